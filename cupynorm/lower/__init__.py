"""Lowers arrays, options and users' functions for a kernel: to C++ types, and to host mirrors of its structs."""
