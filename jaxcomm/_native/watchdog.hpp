// The watchdog: a thread of our own that says what the ranks do when an operation takes too long, when a signal asks,
// or when Ctrl-C comes and nothing happens. It needs no Python, whose lock may be held, and no thread of XLA's.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace jaxcomm {

// What follows the report on an operation that takes too long.
enum class Then : int { kWait = 0, kRaise = 1, kAbort = 2 };

struct Watch {
  double seconds = 0;  // 0: no limit
  Then then = Then::kWait;
  std::string directory;  // where reports go
  std::string host;
  // A duplicate of COMM_WORLD, over which ranks ask each other; only if MPI may be called by several threads at once.
  std::uint64_t comm = 0;
  bool exchanges = false;
  std::uint64_t world = 0;
  int rank = 0, size = 1;
};

// Starts the thread, or changes what it watches for.
void start_watchdog(const Watch& watch);
// Before MPI ends.
void stop_watchdog();
// Listens to SIGUSR1 and SIGINT, which go on to whoever had them, such as Python and the MPI library.
void listen_to_signals();

// Operations up to this number are given up as soon as they notice.
inline std::atomic<std::int64_t> given_up{0};
// Whether operations are to be done in a way that lets them notice.
inline std::atomic<bool> interruptible{false};

}  // namespace jaxcomm
