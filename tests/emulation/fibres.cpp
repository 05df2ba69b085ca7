// The fibres of a CTA, and what the test calls: emulation_seed, emulation_readable.
#include "fibres.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <numeric>
#include <vector>

namespace attnloom {
namespace sm80 {
constexpr uint32_t kMostShared = 228 << 10;
__attribute__((aligned(128))) char shared_memory[kMostShared];
}  // namespace sm80
}  // namespace attnloom

namespace emulation {
namespace {

constexpr uint32_t kMostThreads = 1024;
constexpr size_t kStack = 256 << 10;
constexpr size_t kGuard = 4096;

// Where some threads meet; the last one to come opens it.
struct Meeting {
  uint64_t times = 0;
  uint32_t arrived = 0;
  uint32_t lanes = 0;
  uint32_t given = 0;  // of meet_all: threads that gave true, and of the time before
  uint32_t given_before = 0;
  const char* instruction = "";
  Given words[2];  // of this time and of the time before, which some still read
};

struct Fibre {
  jmp_buf place;
  char* stack = nullptr;
  bool started = false;
  bool done = false;
  const Meeting* waits = nullptr;
  uint64_t until = 0;  // it has been opened so often
};

Fibre fibres[kMostThreads];
Meeting of_warp[kMostThreads / 32][33];  // by the first lane of those that meet; the last is that of all lanes
Meeting of_cta;
std::vector<std::pair<const char*, const char*>> allowed;
std::mt19937 numbers;
const std::function<void()>* body;
jmp_buf launcher;
uint32_t current, count, dynamic_bytes;
Place at;

bool runnable(const Fibre& fibre) {
  return !fibre.done && (fibre.waits == nullptr || fibre.waits->times > fibre.until);
}

// The next fibre is mostly the neighbour, sometimes any.
int next_after(uint32_t from) {
  if (random(4) == 0) from = random(count);
  for (uint32_t step = 1; step <= count; ++step) {
    const uint32_t index = (from + step) % count;
    if (runnable(fibres[index])) return static_cast<int>(index);
  }
  return -1;
}

[[noreturn]] void deadlock() {
  std::fprintf(stderr, "CTA (%u, %u, %u): deadlock\n", at.x, at.y, at.z);
  for (uint32_t i = 0; i < count; ++i) {
    if (i > 0 && fibres[i].done == fibres[i - 1].done && fibres[i].waits == fibres[i - 1].waits) continue;
    const char* where = fibres[i].done ? "(has ended)" : fibres[i].waits->instruction;
    std::fprintf(stderr, "  thread %u and those after it: %s\n", i, where);
  }
  _exit(3);
}

void start() {
  (*body)();
  fibres[current].done = true;
  fibres[current].waits = nullptr;
  _longjmp(launcher, 1);
}

void go_to(uint32_t index) {
  current = index;
  Fibre& fibre = fibres[index];
  if (fibre.started) _longjmp(fibre.place, 1);
  fibre.started = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fibre.stack;
  context.uc_stack.ss_size = kStack;
  context.uc_link = nullptr;
  makecontext(&context, start, 0);
  setcontext(&context);
}

void wait_for(const Meeting& meeting, uint64_t until) {
  Fibre& me = fibres[current];
  me.waits = &meeting;
  me.until = until;
  const int next = next_after(current);
  if (next < 0) deadlock();
  if (static_cast<uint32_t>(next) != current && _setjmp(me.place) == 0) go_to(next);
  me.waits = nullptr;
}

void arrive(Meeting& meeting, uint32_t lanes, uint32_t of, const char* instruction) {
  if (meeting.arrived == 0) {
    meeting.instruction = instruction;
    meeting.lanes = lanes;
  }
  if (meeting.lanes != lanes || std::strcmp(meeting.instruction, instruction) != 0) {
    fail("comes to %s of lanes %08x where others of its warp came to %s of lanes %08x", instruction, lanes,
         meeting.instruction, meeting.lanes);
  }
  if (++meeting.arrived < of) return wait_for(meeting, meeting.times);
  meeting.arrived = 0;
  meeting.given_before = meeting.given;
  meeting.given = 0;
  ++meeting.times;
}

void run_cta() {
  using attnloom::sm80::kMostShared;
  using attnloom::sm80::shared_memory;
  std::memset(shared_memory, 0xff, kMostShared);  // NaN, as 16-bit floats too
  for (auto& meetings : of_warp) std::fill(std::begin(meetings), std::end(meetings), Meeting());
  of_cta = Meeting();
  for (uint32_t i = 0; i < count; ++i) {
    Fibre& fibre = fibres[i];
    fibre.started = fibre.done = false;
    fibre.waits = nullptr;
    if (fibre.stack != nullptr) continue;
    void* room = mmap(nullptr, kGuard + kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED || mprotect(room, kGuard, PROT_NONE) != 0) fail("no room for its stack");
    fibre.stack = static_cast<char*>(room) + kGuard;
  }
  _setjmp(launcher);  // where a fibre comes to that has ended
  const int next = next_after(random(count));
  if (next >= 0) go_to(next);
  for (uint32_t i = 0; i < count; ++i) {
    if (!fibres[i].done) deadlock();
  }
  for (uint32_t i = dynamic_bytes; i < kMostShared; ++i) {
    if (shared_memory[i] != '\xff') fail("byte %u of %u of shared memory was written", i, dynamic_bytes);
  }
}

}  // namespace

uint32_t thread() { return current; }
uint32_t threads() { return count; }
Place block() { return at; }
uint32_t shared_bytes() { return dynamic_bytes; }
uint32_t random(uint32_t below) { return numbers() % below; }

void fail(const char* format, ...) {
  std::fprintf(stderr, "CTA (%u, %u, %u), thread %u: ", at.x, at.y, at.z, current);
  va_list values;
  va_start(values, format);
  std::vfprintf(stderr, format, values);
  va_end(values);
  std::fputc('\n', stderr);
  _exit(3);
}

const Given& meet(uint32_t lanes, const char* instruction, std::initializer_list<uint32_t> words) {
  const uint32_t warp = current / 32, lane = current % 32;
  if ((lanes >> lane & 1) == 0) fail("%s of lanes %08x without it", instruction, lanes);
  Meeting& meeting = of_warp[warp][lanes == 0xffffffff ? 32 : __builtin_ctz(lanes)];
  Given& room = meeting.words[meeting.times % 2];
  std::copy(words.begin(), words.end(), room.of_lane[lane]);
  arrive(meeting, lanes, __builtin_popcount(lanes), instruction);
  return room;
}

uint32_t meet_all(const char* instruction, bool given_here) {
  of_cta.given += given_here;
  arrive(of_cta, 0, count, instruction);
  return of_cta.given_before;
}

bool readable(const void* from, uint32_t bytes) {
  const char* first = static_cast<const char*>(from);
  return std::any_of(allowed.begin(), allowed.end(),
                     [&](const auto& range) { return range.first <= first && first + bytes <= range.second; });
}

void run_grid(Place grid, uint32_t threads, uint32_t shared, const std::function<void()>& kernel) {
  body = &kernel;
  count = threads;
  dynamic_bytes = shared;
  std::vector<uint32_t> order(grid.x * grid.y * grid.z);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), numbers);
  for (const uint32_t index : order) {
    at = {index % grid.x, index / grid.x % grid.y, index / grid.x / grid.y};
    run_cta();
  }
}

}  // namespace emulation

extern "C" __attribute__((visibility("default"))) void emulation_seed(uint32_t seed) {
  emulation::numbers.seed(seed);
  emulation::allowed.clear();
}
extern "C" __attribute__((visibility("default"))) void emulation_readable(const char* first, int64_t bytes) {
  emulation::allowed.emplace_back(first, first + bytes);
}
