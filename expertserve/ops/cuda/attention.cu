// Attention over the KV cache.

// Element types of the KV cache.
struct HalfCell {
    typedef u16 type;
    __device__ static float get(u16 v) { return half_to_float(v); }
    __device__ static u16 put(float v) { return float_to_half(v); }
};
struct FloatCell {
    typedef float type;
    __device__ static float get(float v) { return v; }
    __device__ static float put(float v) { return v; }
};

// cache[cells[row]] = x[row], rows of n values. Grid: n / 128, rows.
template <class T> __global__ void write_cells(const float *x, const long long *cells, typename T::type *cache, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) cache[cells[blockIdx.y] * n + i] = T::put(x[(long long)blockIdx.y * n + i]);
}

// One query head over one stretch of the KV cells, by online softmax: flash-decoding (Dao et al. 2023). Each warp takes
// every WARPS-th cell of the stretch; warps merge in order. Leaves in `part` [rows, heads, splits, v_dim + 2] the
// maximum, the sum of exponentials and the unnormalised output. Cells the mask hides are not read. Heads have at most
// MOST values; a cell's values are v_width apart from the next one's. Grid: heads, splits, rows.
template <class T, int MOST>
__global__ void attend(const float *q, const typename T::type *keys, const typename T::type *values, const u16 *mask,
                       float *part, int kv_heads, int k_dim, int v_dim, int v_width, int n_kv, int stretch,
                       float scale) {
    __shared__ float maxima[WARPS], sums[WARPS], outputs[WARPS][MOST];
    int head = blockIdx.x, split = blockIdx.y, row = blockIdx.z, warp = threadIdx.x / 32, warp_lane = threadIdx.x % 32;
    int kv_head = head / (gridDim.x / kv_heads);
    float query[MOST / 32], acc[MOST / 32];
    for (int j = 0; j < MOST / 32; j++) {
        int i = warp_lane + 32 * j;
        query[j] = i < k_dim ? q[((long long)row * gridDim.x + head) * k_dim + i] * scale : 0;
        acc[j] = 0;
    }
    float maximum = -INFINITY, sum = 0;
    int end = (split + 1) * stretch < n_kv ? (split + 1) * stretch : n_kv;
    for (int cell = split * stretch + warp; cell < end; cell += WARPS) {
        float bias = half_to_float(mask[(long long)row * n_kv + cell]);
        if (bias == -INFINITY) continue;
        const typename T::type *k = keys + ((long long)cell * kv_heads + kv_head) * k_dim;
        const typename T::type *v = values + (long long)cell * v_width + kv_head * v_dim;
        float score = 0;
#pragma unroll
        for (int j = 0; j < MOST / 32; j++)
            if (warp_lane + 32 * j < k_dim) score += query[j] * T::get(k[warp_lane + 32 * j]);
        score = warp_sum(score) + bias;
        float above = fmaxf(maximum, score), keep = expf(maximum - above), add = expf(score - above);
        maximum = above;
        sum = sum * keep + add;
#pragma unroll
        for (int j = 0; j < MOST / 32; j++)
            if (warp_lane + 32 * j < v_dim) acc[j] = acc[j] * keep + add * T::get(v[warp_lane + 32 * j]);
    }
    if (warp_lane == 0) maxima[warp] = maximum, sums[warp] = sum;
    for (int j = 0; j < MOST / 32; j++) outputs[warp][warp_lane + 32 * j] = acc[j];
    __syncthreads();
    float top = -INFINITY, total = 0;
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, maxima[w]);
    part += (((long long)row * gridDim.x + head) * gridDim.y + split) * (v_dim + 2);
    for (int w = 0; w < WARPS; w++) total += maxima[w] == -INFINITY ? 0 : sums[w] * expf(maxima[w] - top);
    for (int i = threadIdx.x; i < v_dim; i += blockDim.x) {
        float value = 0;
        for (int w = 0; w < WARPS; w++) value += maxima[w] == -INFINITY ? 0 : outputs[w][i] * expf(maxima[w] - top);
        part[2 + i] = value;
    }
    if (threadIdx.x == 0) part[0] = top, part[1] = total;
}

// Merges the stretches of `attend` in order into out [rows, heads, v_dim]. Grid: heads, rows.
__global__ void merge_attention(const float *part, float *out, int splits, int v_dim) {
    long long head = (long long)blockIdx.y * gridDim.x + blockIdx.x;
    part += head * splits * (v_dim + 2);
    float top = -INFINITY, total = 0;
    for (int s = 0; s < splits; s++) top = fmaxf(top, part[s * (v_dim + 2)]);
    for (int s = 0; s < splits; s++) {
        const float *p = part + s * (v_dim + 2);
        total += p[0] == -INFINITY ? 0 : p[1] * expf(p[0] - top);
    }
    for (int i = threadIdx.x; i < v_dim; i += blockDim.x) {
        float value = 0;
        for (int s = 0; s < splits; s++) {
            const float *p = part + s * (v_dim + 2);
            value += p[0] == -INFINITY ? 0 : p[2 + i] * expf(p[0] - top);
        }
        out[head * v_dim + i] = value / total;
    }
}
