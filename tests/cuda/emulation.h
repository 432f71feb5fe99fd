// A small CUDA on one CPU thread: every thread of a block is a fiber, barriers and shuffles switch between them.
//
// Blocks run one after another, so shared memory may be static. A barrier that not every living thread reaches, or a
// shuffle that not every living lane of a warp reaches, ends the process with a message instead of hanging.
#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <tuple>
#include <utility>

#define CUDA_EMULATION
#define __global__ static
#define __device__
#define __forceinline__ inline
#define __shared__ static

struct Index3 {
    unsigned x, y, z;
};
struct float4 {
    float x, y, z, w;
};
static Index3 threadIdx, blockIdx, blockDim, gridDim;

static inline float half_to_float(unsigned short bits) {
    _Float16 value;
    memcpy(&value, &bits, 2);
    return (float)value;
}
static inline unsigned short float_to_half(float value) {
    _Float16 half = (_Float16)value;
    unsigned short bits;
    memcpy(&bits, &half, 2);
    return bits;
}
static inline float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

namespace emulation {
const int MOST_THREADS = 256, WARP = 32, STACK = 64 << 10;

struct Gate {  // lets threads pass once all that live have come
    int living, waiting, generation;
};
struct Fiber {
    ucontext_t start;
    jmp_buf at;
    bool begun, ended;
    Index3 index;
};
static Fiber fibers[MOST_THREADS];
static char stacks[MOST_THREADS][STACK];
static jmp_buf scheduler;
static int current;
static unsigned long long progress;
static Gate block_gate, warp_gates[MOST_THREADS / WARP];
static float lanes[2][MOST_THREADS];
static unsigned turn[MOST_THREADS];
static void (*body)();

static void yield() {
    if (!_setjmp(fibers[current].at)) _longjmp(scheduler, 1);
}
static void open_if_full(Gate &gate) {
    if (gate.living && gate.waiting == gate.living) {
        gate.waiting = 0;
        gate.generation++;
        progress++;
    }
}
static void pass(Gate &gate) {
    int generation = gate.generation;
    gate.waiting++;
    open_if_full(gate);
    while (gate.generation == generation) yield();
}
static void enter() {
    for (;;) {  // a fiber lives on and takes the same thread of the next block: to make one costs system calls
        body();
        fibers[current].ended = true;
        progress++;
        Gate &warp = warp_gates[current / WARP];
        warp.living--, block_gate.living--;
        open_if_full(warp), open_if_full(block_gate);
        yield();
    }
}
static void run_block(int threads) {
    block_gate = {threads, 0, 0};
    for (int w = 0; w < threads / WARP; w++) warp_gates[w] = {WARP, 0, 0};
    for (int i = 0; i < threads; i++) fibers[i].ended = false, turn[i] = 0;
    for (int left = threads; left;) {
        unsigned long long before = progress;
        left = 0;
        for (volatile int i = 0; i < threads; i++) {
            Fiber &fiber = fibers[i];
            if (fiber.ended) continue;
            current = i;
            threadIdx = {(unsigned)i, 0, 0};
            if (!_setjmp(scheduler)) {
                if (fiber.begun) _longjmp(fiber.at, 1);
                fiber.begun = true;
                getcontext(&fiber.start);
                fiber.start.uc_stack.ss_sp = stacks[i];
                fiber.start.uc_stack.ss_size = STACK;
                fiber.start.uc_link = nullptr;
                makecontext(&fiber.start, enter, 0);
                setcontext(&fiber.start);
            }
            if (!fibers[i].ended) left++;
        }
        if (left && progress == before) {
            fprintf(stderr, "emulated CUDA: threads wait for each other at a barrier or a shuffle\n");
            abort();
        }
    }
}
}  // namespace emulation

static inline void __syncthreads() { emulation::pass(emulation::block_gate); }
static inline float __shfl_xor_sync(unsigned mask, float value, int step) {
    using namespace emulation;
    int me = current, side = turn[me]++ % 2;  // two sides: a fast lane must not overwrite what a slow one still reads
    lanes[side][me] = value;
    pass(warp_gates[me / WARP]);
    return lanes[side][me ^ step];
}

template <class... A, size_t... I>
static void launch(void (*kernel)(A...), void **args, const unsigned *grid, unsigned threads, std::index_sequence<I...>) {
    static std::tuple<A...> values;
    static void (*called)(A...);
    values = std::tuple<A...>(*(A *)args[I]...);
    called = kernel;
    emulation::body = [] { std::apply(called, values); };
    blockDim = {threads, 1, 1}, gridDim = {grid[0], grid[1], grid[2]};
    for (unsigned z = 0; z < grid[2]; z++)
        for (unsigned y = 0; y < grid[1]; y++)
            for (unsigned x = 0; x < grid[0]; x++) {
                blockIdx = {x, y, z};
                emulation::run_block(threads);
            }
}
template <class... A> static void launch(void (*kernel)(A...), void **args, const unsigned *grid, unsigned threads) {
    launch(kernel, args, grid, threads, std::index_sequence_for<A...>());
}
