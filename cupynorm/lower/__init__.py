"""How arrays, options and users' functions look to a kernel: C++ types, and host mirrors of its structs."""
