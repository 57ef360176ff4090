// What kernels/base/mailbox.cuh has in PTX, in C++ for the simulator. That file includes this one in its place.
#pragma once

namespace cupynorm {

inline void clear_mailbox(MailboxWord* pair) { pair[0].bits = pair[1].bits = 0; }
inline void send_mailbox(MailboxWord* pair, unsigned a, unsigned b) {
  pair[0] = mailbox_word(a, b, false), pair[1] = mailbox_word(b, a, true);
}
template <int kMaxPolls, int kCount>
inline bool await_mailbox(const MailboxWord* from, unsigned (&word)[kCount], SIMULATOR_HERE) {
  auto come = [](const void* at) {
    const MailboxWord* pair = static_cast<const MailboxWord*>(at);
    return both_valid(pair[0], pair[1]);
  };
  for (int i = 0; i < kCount; i += 2) {
    if (!simulator::await_written(from + i, come, {"await_mailbox", file, line})) return false;
  }
  for (int i = 0; i < kCount; ++i) word[i] = unsigned(from[i].bits);
  return true;
}
inline void stop(const char* should_hold, SIMULATOR_HERE) {
  simulator::fail(should_hold, {"should hold: stop", file, line});
}

}  // namespace cupynorm
