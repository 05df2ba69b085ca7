// The fibres of some CTAs, and what the test calls: emulation_seed, emulation_readable.
#include "fibres.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
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

struct Cta {
  Place at;
  uint32_t current = 0;  // the fibre that runs
  uint32_t left = 0;     // that have not ended
  uint32_t slow = 0;     // a warp that runs when no other can, or none
  Fibre fibres[kMostThreads];
  Meeting of_warp[kMostThreads / 32][33];  // by the first lane of those that meet; the last is that of all lanes
  Meeting of_all;
  std::vector<char> shared;  // while another CTA runs
};

// CTAs run side by side, so many at a time; what is in shared_memory belongs to one.
constexpr uint32_t kTogether = 3;
constexpr uint32_t kLongestStay = 16;  // log2 of waits until another one goes on: from few to as many as a piece takes
Cta ctas[kTogether];
Cta* now = &ctas[0];
std::vector<Place> to_come;
std::vector<std::pair<const char*, const char*>> allowed;
std::mt19937 numbers;
const std::function<void()>* body;
jmp_buf launcher;
uint32_t count, dynamic_bytes;
Place shape;  // of the grid
uint32_t stay = 1;

bool runnable(const Fibre& fibre) {
  return !fibre.done && (fibre.waits == nullptr || fibre.waits->times > fibre.until);
}

[[noreturn]] void deadlock() {
  const auto& fibres = now->fibres;
  std::fprintf(stderr, "CTA (%u, %u, %u): deadlock\n", now->at.x, now->at.y, now->at.z);
  for (uint32_t i = 0; i < count; ++i) {
    if (i > 0 && fibres[i].done == fibres[i - 1].done && fibres[i].waits == fibres[i - 1].waits) continue;
    const char* where = fibres[i].done ? "(has ended)" : fibres[i].waits->instruction;
    std::fprintf(stderr, "  thread %u and those after it: %s\n", i, where);
  }
  _exit(3);
}

void start() {
  (*body)();
  Fibre& me = now->fibres[now->current];
  me.done = true;
  me.waits = nullptr;
  --now->left;
  _longjmp(launcher, 1);
}

void enter(Cta& cta) {
  if (&cta == now) return;
  now->shared.assign(attnloom::sm80::shared_memory, attnloom::sm80::shared_memory + dynamic_bytes);
  now = &cta;
  std::copy(now->shared.begin(), now->shared.end(), attnloom::sm80::shared_memory);
}

// Some CTA that has not ended, if there is one.
bool enter_any() {
  stay = 1u << random(kLongestStay + 1);
  const uint32_t from = random(kTogether);
  for (uint32_t step = 0; step < kTogether; ++step) {
    Cta& cta = ctas[(from + step) % kTogether];
    if (cta.left == 0) continue;
    enter(cta);
    return true;
  }
  return false;
}

// Goes to a fibre of the CTA that can go on: mostly the neighbour, sometimes any, the slow warp last.
[[noreturn]] void go_on() {
  uint32_t index = random(4) == 0 ? random(count) : now->current;
  uint32_t steps = 0;
  do {
    index = (index + 1) % count;
    if (++steps > 2 * count) deadlock();
  } while (!runnable(now->fibres[index]) || (steps <= count && index / 32 == now->slow));
  now->current = index;
  Fibre& fibre = now->fibres[index];
  if (fibre.started) _longjmp(fibre.place, 1);
  fibre.started = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fibre.stack;
  context.uc_stack.ss_size = kStack;
  context.uc_link = nullptr;
  makecontext(&context, start, 0);
  setcontext(&context);
  fail("it does not start");
}

void wait_for(const Meeting& meeting) {
  Fibre& me = now->fibres[now->current];
  me.waits = &meeting;
  me.until = meeting.times;
  if (_setjmp(me.place) == 0) {
    if (stay == 0) enter_any();
    --stay;
    go_on();
  }
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
  if (++meeting.arrived < of) return wait_for(meeting);
  meeting.arrived = 0;
  meeting.given_before = meeting.given;
  meeting.given = 0;
  ++meeting.times;
}

void check_end_of_shared() {
  using namespace attnloom::sm80;
  for (uint32_t i = dynamic_bytes; i < kMostShared; ++i) {
    if (shared_memory[i] != '\xff') fail("byte %u of %u of shared memory was written", i, dynamic_bytes);
  }
}

void begin(Cta& cta, Place at) {
  cta.at = at;
  cta.left = count;
  cta.slow = random(2 * ((count + 31) / 32));  // in half of the CTAs
  cta.of_all = Meeting();
  for (uint32_t warp = 0; warp < (count + 31) / 32; ++warp) {
    std::fill(std::begin(cta.of_warp[warp]), std::end(cta.of_warp[warp]), Meeting());
  }
  for (uint32_t i = 0; i < count; ++i) {
    Fibre& fibre = cta.fibres[i];
    fibre.started = fibre.done = false;
    fibre.waits = nullptr;
    if (fibre.stack != nullptr) continue;
    void* room = mmap(nullptr, kGuard + kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED || mprotect(room, kGuard, PROT_NONE) != 0) fail("no room for its stack");
    fibre.stack = static_cast<char*>(room) + kGuard;
  }
  cta.shared.assign(dynamic_bytes, '\xff');  // NaN, as 16-bit floats too
  if (&cta == now) std::copy(cta.shared.begin(), cta.shared.end(), attnloom::sm80::shared_memory);
}

}  // namespace

uint32_t thread() { return now->current; }
uint32_t fibre() { return (now - ctas) * kMostThreads + now->current; }
uint32_t threads() { return count; }
Place block() { return now->at; }
Place grid() { return shape; }
uint32_t shared_bytes() { return dynamic_bytes; }
uint32_t random(uint32_t below) { return numbers() % below; }

void fail(const char* format, ...) {
  std::fprintf(stderr, "CTA (%u, %u, %u), thread %u: ", now->at.x, now->at.y, now->at.z, now->current);
  va_list values;
  va_start(values, format);
  std::vfprintf(stderr, format, values);
  va_end(values);
  std::fputc('\n', stderr);
  _exit(3);
}

void pause() {
  if (_setjmp(now->fibres[now->current].place) != 0) return;
  enter_any();
  if (random(2) == 0) stay = UINT32_MAX;  // until the other one has ended
  go_on();
}

const Given& meet(uint32_t lanes, const char* instruction, std::initializer_list<uint32_t> words) {
  const uint32_t warp = now->current / 32, lane = now->current % 32;
  if ((lanes >> lane & 1) == 0) fail("%s of lanes %08x without it", instruction, lanes);
  Meeting& meeting = now->of_warp[warp][lanes == 0xffffffff ? 32 : __builtin_ctz(lanes)];
  Given& room = meeting.words[meeting.times % 2];
  std::copy(words.begin(), words.end(), room.of_lane[lane]);
  arrive(meeting, lanes, __builtin_popcount(lanes), instruction);
  return room;
}

uint32_t meet_all(const char* instruction, bool given_here) {
  Meeting& all = now->of_all;
  all.given += given_here;
  arrive(all, 0, count, instruction);
  return all.given_before;
}

bool readable(const void* from, uint32_t bytes) {
  const char* first = static_cast<const char*>(from);
  return std::any_of(allowed.begin(), allowed.end(),
                     [&](const auto& range) { return range.first <= first && first + bytes <= range.second; });
}

void run_grid(Place grid, uint32_t threads, uint32_t shared, const std::function<void()>& kernel) {
  body = &kernel;
  count = threads;
  shape = grid;
  dynamic_bytes = shared;
  std::memset(attnloom::sm80::shared_memory, 0xff, attnloom::sm80::kMostShared);
  to_come.clear();
  for (uint32_t i = 0; i < grid.x * grid.y * grid.z; ++i) {
    to_come.push_back({i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y});
  }
  std::shuffle(to_come.begin(), to_come.end(), numbers);
  _setjmp(launcher);  // where a fibre comes to that has ended
  if (now->left == 0) check_end_of_shared();
  for (Cta& cta : ctas) {
    if (cta.left != 0 || to_come.empty()) continue;
    begin(cta, to_come.back());
    to_come.pop_back();
  }
  if (enter_any()) go_on();
}

}  // namespace emulation

extern "C" __attribute__((visibility("default"))) void emulation_seed(uint32_t seed) {
  emulation::numbers.seed(seed);
  emulation::allowed.clear();
}
extern "C" __attribute__((visibility("default"))) void emulation_readable(const char* first, int64_t bytes) {
  emulation::allowed.emplace_back(first, first + bytes);
}
