// Kernels of the decoder: products with quantised rows, routed experts where they lie in slots, norms, rotation, attention.
//
// Activations are float32, rows outermost; sums are taken in one fixed order, without atomics, so that a result does not
// depend on what else was launched. Blocks are whole warps. Nothing here waits for the host.

#define WARPS 4
#define TILE 8
#define FULL 0xffffffffu
#define MAX_HEAD 256

__device__ __forceinline__ float warp_sum(float value) {
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(FULL, value, step);
    return value;
}

// Products of one weight row with up to TILE rows of x, by one warp; every lane gets all sums.
template <class F>
__device__ __forceinline__ void row_products(const u8 *weight, const float *const *x, int count, int n, float *sums) {
    int warp_lane = threadIdx.x % 32;
    for (int r = 0; r < TILE; r++) sums[r] = 0;
    for (int first = warp_lane * 8; first < n; first += 256) {
        float w[8];
        Row<F>::decode8(weight, first, n, w);
        int width = n - first < 8 ? n - first : 8;
#pragma unroll
        for (int r = 0; r < TILE; r++)
            if (r < count)
                for (int i = 0; i < width; i++) sums[r] += w[i] * x[r][first + i];
    }
    for (int r = 0; r < TILE; r++)
        if (r < count) sums[r] = warp_sum(sums[r]);
}

// y[rows, out] = x[rows, in] * weight[out, in]^T + bias[out]. Grid: out / WARPS, rows / TILE.
template <class F>
__global__ void matvec(const u8 *weight, const float *x, const float *bias, float *y, int in, int out, int rows) {
    int o = blockIdx.x * WARPS + threadIdx.x / 32, first = blockIdx.y * TILE;
    if (o >= out) return;
    int count = rows - first < TILE ? rows - first : TILE;
    const float *from[TILE];
    for (int r = 0; r < TILE; r++) from[r] = x + (long long)(first + (r < count ? r : 0)) * in;
    float sums[TILE];
    row_products<F>(weight + o * row_bytes<F>(in), from, count, in, sums);
    if (threadIdx.x % 32 == 0)
        for (int r = 0; r < count; r++) y[(long long)(first + r) * out + o] = sums[r] + (bias ? bias[o] : 0);
}

// out[rows, n] = rows `ids` of weight (all of them in order where ids is null). Grid: n / (8 * 128), rows.
template <class F> __global__ void take_rows(const u8 *weight, const int *ids, float *out, int n) {
    int first = (blockIdx.x * blockDim.x + threadIdx.x) * 8, row = blockIdx.y;
    if (first >= n) return;
    float w[8];
    Row<F>::decode8(weight + (ids ? ids[row] : row) * row_bytes<F>(n), first, n, w);
    for (int i = 0; i < 8 && first + i < n; i++) out[(long long)row * n + first + i] = w[i];
}

__device__ __forceinline__ float silu(float x) { return x / (1 + expf(-x)); }

// h[pair, ffn] = silu(gate x) * up x for the pairs of each group. Grid: ffn / WARPS, groups.
template <class G, class U>
__global__ void expert_gate_up(const u64 *gate, const u64 *up, const int *group_start, const int *pairs, const float *x,
                               float *h, int hidden, int ffn, int top_k) {
    int f = blockIdx.x * WARPS + threadIdx.x / 32, group = blockIdx.y;
    if (f >= ffn) return;
    const u8 *gate_row = (const u8 *)gate[group] + f * row_bytes<G>(hidden);
    const u8 *up_row = (const u8 *)up[group] + f * row_bytes<U>(hidden);
    for (int first = group_start[group]; first < group_start[group + 1]; first += TILE) {
        int left = group_start[group + 1] - first, count = left < TILE ? left : TILE;
        const float *from[TILE];
        for (int r = 0; r < TILE; r++) from[r] = x + (long long)(pairs[first + (r < count ? r : 0)] / top_k) * hidden;
        float g[TILE], u[TILE];
        row_products<G>(gate_row, from, count, hidden, g);
        row_products<U>(up_row, from, count, hidden, u);
        if (threadIdx.x % 32 == 0)
            for (int r = 0; r < count; r++) h[(long long)pairs[first + r] * ffn + f] = silu(g[r]) * u[r];
    }
}

// y[pair, hidden] = down h[pair] for the pairs of each group. Grid: hidden / WARPS, groups.
template <class D>
__global__ void expert_down(const u64 *down, const int *group_start, const int *pairs, const float *h, float *y, int hidden,
                            int ffn) {
    int o = blockIdx.x * WARPS + threadIdx.x / 32, group = blockIdx.y;
    if (o >= hidden) return;
    const u8 *row = (const u8 *)down[group] + o * row_bytes<D>(ffn);
    for (int first = group_start[group]; first < group_start[group + 1]; first += TILE) {
        int left = group_start[group + 1] - first, count = left < TILE ? left : TILE;
        const float *from[TILE];
        for (int r = 0; r < TILE; r++) from[r] = h + (long long)pairs[first + (r < count ? r : 0)] * ffn;
        float sums[TILE];
        row_products<D>(row, from, count, ffn, sums);
        if (threadIdx.x % 32 == 0)
            for (int r = 0; r < count; r++) y[(long long)pairs[first + r] * hidden + o] = sums[r];
    }
}

// out[row] = sum over j of weights[row, j] * y[row, j], in order of j. Grid: hidden / 128, rows.
__global__ void combine_experts(const float *weights, const float *y, float *out, int hidden, int top_k) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
    if (i >= hidden) return;
    float sum = 0;
    for (int j = 0; j < top_k; j++) sum += weights[row * top_k + j] * y[((long long)row * top_k + j) * hidden + i];
    out[(long long)row * hidden + i] = sum;
}

// RMS norm of rows of n values; weight may be null. Grid: rows; a block is WARPS warps.
__global__ void rms_norm(const float *x, const float *weight, float *out, int n, float eps) {
    __shared__ float parts[WARPS];
    x += (long long)blockIdx.x * n;
    out += (long long)blockIdx.x * n;
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += x[i] * x[i];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int w = 0; w < WARPS; w++) sum += parts[w];
    float factor = 1 / sqrtf(sum / n + eps);
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = x[i] * factor * (weight ? weight[i] : 1);
}

// Rotates the first 2 * half values of heads of x [rows, heads, dim]; neighbours pair up, or halves (neox). `frequency`
// is in double precision because it is multiplied by positions of many thousands. Grid: heads, rows.
__global__ void rope(const float *x, const int *positions, const double *frequency, float *out, int dim, int half, int neox,
                     float magnitude) {
    long long head = ((long long)blockIdx.y * gridDim.x + blockIdx.x) * dim;
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        double angle = positions[blockIdx.y] * frequency[i];
        angle -= 6.283185307179586476925 * floor(angle * 0.159154943091895335769);
        float c = cosf((float)angle) * magnitude, s = sinf((float)angle) * magnitude;
        long long first = head + (neox ? i : 2 * i), second = first + (neox ? half : 1);
        float a = x[first], b = x[second];
        out[first] = a * c - b * s;
        out[second] = a * s + b * c;
    }
    for (int i = 2 * half + threadIdx.x; i < dim; i += blockDim.x) out[head + i] = x[head + i];
}

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
// every WARPS-th cell of the stretch; warps merge in order. Leaves in `part` [rows, heads, splits, v_dim + 2] the maximum,
// the sum of exponentials and the unnormalised output. Cells the mask hides are not read. Grid: heads, splits, rows.
template <class T>
__global__ void attend(const float *q, const typename T::type *keys, const typename T::type *values, const u16 *mask,
                       float *part, int kv_heads, int k_dim, int v_dim, int n_kv, int stretch, float scale) {
    __shared__ float maxima[WARPS], sums[WARPS], outputs[WARPS][MAX_HEAD];
    int head = blockIdx.x, split = blockIdx.y, row = blockIdx.z, warp = threadIdx.x / 32, warp_lane = threadIdx.x % 32;
    int kv_head = head / (gridDim.x / kv_heads);
    float query[MAX_HEAD / 32], acc[MAX_HEAD / 32];
    for (int j = 0; j < MAX_HEAD / 32; j++) {
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
        const typename T::type *v = values + ((long long)cell * kv_heads + kv_head) * v_dim;
        float score = 0;
#pragma unroll
        for (int j = 0; j < MAX_HEAD / 32; j++)
            if (warp_lane + 32 * j < k_dim) score += query[j] * T::get(k[warp_lane + 32 * j]);
        score = warp_sum(score) + bias;
        float above = fmaxf(maximum, score), keep = expf(maximum - above), add = expf(score - above);
        maximum = above;
        sum = sum * keep + add;
#pragma unroll
        for (int j = 0; j < MAX_HEAD / 32; j++)
            if (warp_lane + 32 * j < v_dim) acc[j] = acc[j] * keep + add * T::get(v[warp_lane + 32 * j]);
    }
    if (warp_lane == 0) maxima[warp] = maximum, sums[warp] = sum;
    for (int j = 0; j < MAX_HEAD / 32; j++) outputs[warp][warp_lane + 32 * j] = acc[j];
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
