// Some CTAs on one thread of a CPU: their threads are fibres that run one at a time, in random order, and change places
// only where threads of a GPU meet.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <random>

namespace emulation {

struct Place {
  uint32_t x, y, z;
};

// What the kernel is told of its launch.
uint32_t thread();  // of the CTA, the fibre that runs
uint32_t fibre();   // a number that no other thread has which is alive
uint32_t threads();
Place block();
Place grid();
uint32_t shared_bytes();  // of dynamic shared memory, from attnloom::sm80::shared_memory on

// Ends the process with a message that names the CTA and the thread.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Random numbers of the launch's seed.
uint32_t random(uint32_t below);

// The fibre goes on when all threads of `lanes` of its warp have come to the same instruction. What a lane gives
// (at most kWords words) can be read by the others until they meet twice more.
constexpr int kWords = 6;
struct Given {
  uint32_t of_lane[32][kWords];
};
const Given& meet(uint32_t lanes, const char* instruction, std::initializer_list<uint32_t> words = {});

// The same for the whole CTA: how many threads gave true.
uint32_t meet_all(const char* instruction, bool given = false);

// Others go on for a while, of another CTA perhaps.
void pause();

// Memory that asynchronous copies may read.
bool readable(const void* from, uint32_t bytes);

// Runs `kernel` as every thread of every CTA: CTAs in random order, a few at a time.
void run_grid(Place grid, uint32_t threads, uint32_t shared_bytes, const std::function<void()>& kernel);

}  // namespace emulation
