// What every kernel here shares. Activations are float32, rows outermost; sums are taken in one fixed order, without
// atomics, so that a result does not depend on what else was launched. A block has WARPS warps.

#define WARPS 4
#define FULL 0xffffffffu

__device__ __forceinline__ float warp_sum(float value) {
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(FULL, value, step);
    return value;
}

__device__ __forceinline__ float sigmoid(float x) { return 1 / (1 + expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x / (1 + expf(-x)); }

// Gated activations, and their numbers where a kernel takes one.
enum { SILU, GELU, SWIGLU_OAI, RELU };
__device__ __forceinline__ float gated(int kind, float gate, float up) {
    if (kind == SILU) return silu(gate) * up;
    if (kind == GELU) return 0.5f * gate * (1 + tanhf(0.79788456f * gate * (1 + 0.044715f * gate * gate))) * up;
    if (kind == RELU) return fmaxf(gate, 0) * up;
    float limited = fminf(gate, 7.0f);
    return limited / (1 + expf(-1.702f * limited)) * (fmaxf(fminf(up, 7.0f), -7.0f) + 1);
}
