#include "watchdog.hpp"

#include <semaphore.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <list>
#include <memory>
#include <mutex>
#include <numeric>
#include <sstream>
#include <thread>

#include "native.hpp"

namespace jaxcomm {
namespace {

constexpr double kBetweenLooks = 0.1, kForAnswers = 2, kOthersFirst = 1, kNoticeable = 0.2, kTurn = 0.25,
                 kLastTurn = 2;  // seconds
constexpr std::size_t kMostLines = 64;
constexpr int kAsk = 1, kAnswer = 2, kReported = 3;  // tags

double seconds_since(std::int64_t time) { return static_cast<double>(now() - time) * 1e-9; }

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", seconds);
  return text;
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) < 0x20)
      out += ' ';
    else
      out += c;
  }
  return out + '"';
}

// What a rank says of itself: lines for people, the same and more as JSON, and whether it is in an operation.
struct Account {
  bool there = false, busy = false;
  std::string lines, json;

  std::string packed() const { return (busy ? "1" : "0") + lines + '\0' + json; }
  static Account unpacked(const std::string& text) {
    Account account;
    const std::size_t end = text.find('\0');
    if (text.empty() || end == std::string::npos) return account;
    account.there = true, account.busy = text[0] == '1';
    account.lines = text.substr(1, end - 1), account.json = text.substr(end + 1);
    return account;
  }
};

std::string json_of(const Record& record) {
  std::ostringstream out;
  out << "{\"operation\": " << quoted(record.text()) << ", \"number\": " << record.number
      << ", \"began_seconds_ago\": " << seconds_since(record.began);
  if (record.ended >= 0) out << ", \"took_seconds\": " << static_cast<double>(record.ended - record.began) * 1e-9;
  if (record.failed) out << ", \"failed\": true";
  out << "}";
  return out.str();
}

template <class Items, class F>
std::string json_list(const Items& items, F text) {
  std::string out = "[";
  for (const auto& item : items) out += (out.size() > 1 ? ", " : "") + text(item);
  return out + "]";
}

Account account_of_this_rank(const Watch& watch) {
  const std::vector<Record> open = recorder.open(), last = recorder.last();
  const std::vector<std::string> requests = open_requests();
  Account account;
  account.there = true, account.busy = !open.empty();
  for (const Record& record : open)
    account.lines += (account.lines.empty() ? "" : "; and ") +
                     ("has waited " + seconds_text(seconds_since(record.began)) + " in " + record.text());
  if (open.empty() && last.empty()) account.lines = "has done nothing in MPI so far";
  if (open.empty() && !last.empty())
    account.lines = "is in no operation; its last one ended " + seconds_text(seconds_since(last.back().ended)) +
                    " ago: " + last.back().text();
  if (!requests.empty())
    account.lines += "; it has started and not yet waited for " + std::to_string(requests.size()) +
                     (requests.size() == 1 ? " request, " : " requests, the first of them ") + requests.front();
  account.json = "{\"rank\": " + std::to_string(watch.rank) + ", \"host\": " + quoted(watch.host) +
                 ", \"pid\": " + std::to_string(getpid()) +
                 ", \"operations_so_far\": " + std::to_string(recorder.count()) +
                 ", \"waits_in\": " + json_list(open, json_of) + ", \"requests\": " + json_list(requests, quoted) +
                 ", \"last\": " + json_list(last, json_of) + "}";
  return account;
}

void say(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  constexpr std::size_t kMost = 16;
  for (std::size_t i = 0; i < std::min(ranks.size(), kMost); ++i)
    text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  return ranks.size() <= kMost ? text : text + " and " + std::to_string(ranks.size() - kMost) + " more";
}

// What the accounts mean, as a colleague would put it.
std::string diagnosis(const std::vector<Account>& accounts) {
  std::vector<int> busy, idle, silent;
  for (std::size_t i = 0; i < accounts.size(); ++i)
    (!accounts[i].there ? silent : accounts[i].busy ? busy : idle).push_back(static_cast<int>(i));
  std::string text;
  if (!silent.empty())
    text += "  No answer from " + ranks_text(silent) +
            ": it has left the program, was killed or stopped, or its node cannot be reached.\n";
  if (!idle.empty())
    text += "  Outside MPI: " + ranks_text(idle) +
            ". It still computes (then a longer JAXCOMM_TIMEOUT is right), took another branch than the others, or has "
            "failed "
            "(JAXCOMM_ABORT_ON_EXCEPTION=1 ends the job then).\n";
  if (silent.empty() && idle.empty() && accounts.size() > 1)
    text += "  All ranks wait for each other: compare their operations, peers, tags and communicators above. " +
            std::string(checking.load() ? "Checking mode does not see messages that nobody sends or receives, nor a "
                                          "nonblocking collective that meets a blocking one"
                                        : "JAXCOMM_CHECK=1 names a collective that differs") +
            "; under jax.grad an operation may lack a link (docs/differentiation.md).\n";
  return text;
}

template <class H>
class Ranks {
 public:
  explicit Ranks(const Watch& watch) : watch_(watch) {}

  // Tells everybody who asks what this rank does; returns whether somebody did.
  bool answer() {
    bool asked = false;
    std::string question;
    int from = 0;
    while (receive(kAsk, from, question)) {
      send(from, kAnswer, account_of_this_rank(watch_).packed());
      asked = unreported_ = true;
    }
    while (receive(kReported, from, question)) unreported_ = false;
    sent_.remove_if([](const std::unique_ptr<Sent>& sent) {
      int done = 0;
      Status status;
      return loaded<H>.Test(&sent->request, &done, &status) != 0 || done != 0;
    });
    return asked;
  }

  // Whether somebody has asked, and not yet said that the report is made.
  bool unreported() const { return unreported_; }
  void say_reported() {
    for (int rank = 0; rank < watch_.size; ++rank)
      if (rank != watch_.rank) send(rank, kReported, "!");
  }

  std::vector<Account> ask() {
    std::vector<Account> accounts(static_cast<std::size_t>(watch_.size));
    accounts[static_cast<std::size_t>(watch_.rank)] = account_of_this_rank(watch_);
    std::string text;
    int from = 0, missing = watch_.size - 1;
    while (receive(kAnswer, from, text)) {  // too late for an earlier question
    }
    for (int rank = 0; rank < watch_.size; ++rank)
      if (rank != watch_.rank) send(rank, kAsk, "?");
    for (const std::int64_t start = now(); missing > 0 && seconds_since(start) < kForAnswers;) {
      answer();
      if (!receive(kAnswer, from, text)) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        continue;
      }
      Account& account = accounts[static_cast<std::size_t>(from)];
      if (!account.there) --missing;
      account = Account::unpacked(text);
    }
    return accounts;
  }

  void abort(int code) { loaded<H>.Abort(handle_as<H>(watch_.world), code); }

 private:
  struct Sent {
    std::string text;
    H request;
  };
  void send(int to, int tag, std::string text) {
    auto sent = std::make_unique<Sent>();
    sent->text = std::move(text);
    if (loaded<H>.Isend(sent->text.data(), Elements{static_cast<Count>(sent->text.size())}, bytes(), to, tag, comm(),
                        &sent->request) == 0)
      sent_.push_back(std::move(sent));
  }
  bool receive(int tag, int& from, std::string& text) {
    int there = 0;
    Status status;
    if (loaded<H>.Iprobe(constants.any_source, tag, comm(), &there, &status) != 0 || there == 0) return false;
    Count length = 0;
    loaded<H>.Get_elements_x(&status, bytes(), &length);
    std::memcpy(&from, status.bytes + constants.status_source_at, sizeof from);
    text.assign(static_cast<std::size_t>(length), '\0');
    return loaded<H>.Recv(text.data(), Elements{length}, bytes(), from, tag, comm(), &status) == 0;
  }
  H comm() const { return handle_as<H>(watch_.comm); }
  static H bytes() { return handle_as<H>(datatype_of(kByte)->handle); }
  static constexpr int kByte = 6;  // XLA_FFI_DataType_U8

  Watch watch_;
  bool unreported_ = false;
  std::list<std::unique_ptr<Sent>> sent_;
};

sem_t wake;
std::atomic<int> asked_by_signal{0}, interrupts{0};

class Watchdog {
 public:
  void start(const Watch& watch) {
    const std::lock_guard lock(mutex_);
    watch_ = watch;
    int_ranks_ = std::make_unique<Ranks<int>>(watch);
    pointer_ranks_ = std::make_unique<Ranks<void*>>(watch);
    interruptible = watch.seconds > 0 && watch.then == Then::kRaise;
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    sem_post(&wake);
  }
  void stop() {
    leaving_ = true;
    sem_post(&wake);
    if (thread_.joinable()) thread_.join();
  }
  ~Watchdog() {
    if (thread_.joinable()) thread_.detach();
  }

 private:
  void run() {
    while (!leaving_) {
      sleep();
      const std::lock_guard lock(mutex_);
      if (leaving_) return;
      if (watch_.exchanges && ranks([](auto& each) { return each.answer(); })) last_asked_ = now();
      if (asked_by_signal.exchange(0) > 0 && seconds_since(last_asked_) > kOthersFirst) report("a signal asks", false);
      look_at_interrupts();
      if (watch_.seconds > 0) look_at_operations();
    }
  }
  void sleep() {
    if (watch_.seconds <= 0) {
      sem_wait(&wake);
      return;
    }
    timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    const double between = std::min(kBetweenLooks, watch_.seconds / 4);
    until.tv_nsec += static_cast<long>(between * 1e9);
    until.tv_sec += until.tv_nsec / 1000000000, until.tv_nsec %= 1000000000;
    sem_timedwait(&wake, &until);
  }

  // Ctrl-C reaches Python when the operation ends, which it may never do.
  void look_at_interrupts() {
    const int count = interrupts.exchange(0);
    if (count == 0) return;
    const std::vector<Record> open = recorder.open();
    if (open.empty() || seconds_since(open.front().began) < kNoticeable) return;
    if (interruptible && !open.back().facts.mpi4pys) {
      given_up = open.back().number;
    } else if (std::exchange(interrupted_, open.front().number) == open.front().number || count > 1) {
      say(prefix() + "interrupted again: ending the job (MPI_Abort)\n");
      ranks([](auto& each) { return each.abort(130), false; });
      _exit(130);
    } else {
      say(prefix() + "interrupted, but it " + account_of_this_rank(watch_).lines +
          ". Python hears of it when that ends; Ctrl-C once more ends the job.\n");
    }
  }

  void look_at_operations() {
    const std::vector<Record> open = recorder.open();
    if (late_ > 0 && (open.empty() || open.front().number > late_)) {
      say(prefix() + "goes on: what took too long has ended\n");
      late_ = 0;
    }
    if (open.empty()) return;
    const Record& oldest = open.front();
    const double waited = seconds_since(oldest.began);
    if (waited < watch_.seconds) return;
    // The lowest rank asks for all; whoever was asked has nothing to add.
    const double turn = watch_.seconds + std::min(kTurn * watch_.rank, kLastTurn);
    if (late_ < oldest.number && waited >= turn) {
      late_ = oldest.number;
      const bool told = last_asked_ > 0 && seconds_since(last_asked_) < waited - watch_.seconds + kBetweenLooks;
      if (!told)
        report(seconds_text(waited) + " in one operation (JAXCOMM_TIMEOUT is " + seconds_text(watch_.seconds) + ")",
               true);
    }
    if (waited < turn + kOthersFirst || watch_.then == Then::kWait) return;
    // Whoever has asked may still wait for the answer of a rank that gives none. If it is gone itself, nobody reports.
    if (ranks([](auto& each) { return each.unreported(); }) && seconds_since(last_asked_) < kForAnswers + kOthersFirst)
      return;
    if (watch_.then == Then::kRaise) {
      if (given_up.exchange(oldest.number) < oldest.number && oldest.facts.mpi4pys)
        say(prefix() + "goes on waiting: nothing can be raised inside " + oldest.text() + "\n");
      return;
    }
    say(prefix() + account_of_this_rank(watch_).lines +
        "; ending the job (MPI_Abort), since JAXCOMM_TIMEOUT_ACTION is abort\n");
    ranks([](auto& each) { return each.abort(1), false; });
    _exit(1);
  }

  void report(const std::string& why, bool keep) {
    std::vector<Account> accounts;
    if (watch_.exchanges)
      ranks([&](auto& each) { return accounts = each.ask(), false; });
    else
      accounts = {account_of_this_rank(watch_)};
    std::string text = prefix() + why + ". What the ranks do:\n", all;
    // Those that hold the others up first.
    std::vector<std::size_t> order(accounts.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return std::pair(accounts[a].there, accounts[a].busy) < std::pair(accounts[b].there, accounts[b].busy);
    });
    for (std::size_t i = 0; i < std::min(order.size(), kMostLines); ++i) {
      const Account& account = accounts[order[i]];
      const int rank = watch_.exchanges ? static_cast<int>(order[i]) : watch_.rank;
      text += "  rank " + std::to_string(rank) + (account.there ? " " + account.lines : " does not answer") + "\n";
    }
    if (order.size() > kMostLines) text += "  and " + std::to_string(order.size() - kMostLines) + " ranks more\n";
    for (const Account& account : accounts)
      if (account.there) all += (all.empty() ? "\n  " : ",\n  ") + account.json;
    if (watch_.exchanges) text += diagnosis(accounts);
    if (keep)
      text += "  " + written("{\"reason\": " + quoted(why) + ", \"by_rank\": " + std::to_string(watch_.rank) +
                             ", \"ranks\": [" + all + "\n]}\n");
    say(text);
    if (watch_.exchanges) ranks([](auto& each) { return each.say_reported(), false; });
  }
  std::string written(const std::string& json) const {
    const std::string path = watch_.directory + "/jaxcomm-report-" + std::to_string(watch_.rank) + ".json";
    std::FILE* file = std::fopen(path.c_str(), "w");
    const bool done = file != nullptr && std::fwrite(json.data(), 1, json.size(), file) == json.size();
    if (file != nullptr) std::fclose(file);
    return (done ? "The last operations of each rank: " : "The report could not be written to ") + path + "\n";
  }
  std::string prefix() const { return "jaxcomm: rank " + std::to_string(watch_.rank) + ": "; }
  template <class F>
  bool ranks(F run) {
    return handles_are_pointers ? run(*pointer_ranks_) : run(*int_ranks_);
  }

  std::mutex mutex_;  // of everything here; the thread holds it while it looks
  Watch watch_;
  std::unique_ptr<Ranks<int>> int_ranks_;
  std::unique_ptr<Ranks<void*>> pointer_ranks_;
  std::thread thread_;
  std::atomic<bool> leaving_{false};
  std::int64_t late_ = 0, interrupted_ = 0, last_asked_ = 0;
};

Watchdog& watchdog() {
  static Watchdog one;
  return one;
}

// A signal that we listen to, and who had it before: it goes on to that one.
struct Heard {
  std::atomic<int>& count;
  struct sigaction before;
};
Heard of_interrupt{interrupts, {}}, of_question{asked_by_signal, {}};

template <Heard& heard>
void on_signal(int number, siginfo_t* info, void* context) {
  const int kept = errno;
  const struct sigaction& before = heard.before;
  if ((before.sa_flags & SA_SIGINFO) != 0)
    before.sa_sigaction(number, info, context);
  else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN)
    before.sa_handler(number);
  heard.count.fetch_add(1);
  sem_post(&wake);
  errno = kept;
}

template <Heard& heard>
void listen(int number) {
  struct sigaction ours;
  sigaction(number, nullptr, &heard.before);
  ours = heard.before;
  ours.sa_flags |= SA_SIGINFO;
  ours.sa_sigaction = on_signal<heard>;
  sigaction(number, &ours, nullptr);
}

}  // namespace

void start_watchdog(const Watch& watch) { watchdog().start(watch); }

void stop_watchdog() { watchdog().stop(); }

void listen_to_signals() {
  sem_init(&wake, 0, 0);
  struct sigaction interrupt;
  sigaction(SIGINT, nullptr, &interrupt);
  const bool pythons = interrupt.sa_handler != SIG_DFL && interrupt.sa_handler != SIG_IGN;
  if (pythons) listen<of_interrupt>(SIGINT);
  listen<of_question>(SIGUSR1);
}

}  // namespace jaxcomm
