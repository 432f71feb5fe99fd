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

// A score limited to `cap`, unless that is 0.
__device__ __forceinline__ float softcapped(float score, float cap) { return cap ? cap * tanhf(score / cap) : score; }

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
                       float scale, float softcap) {
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
        score = softcapped(warp_sum(score), softcap) + bias;
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

// Merges the stretches of `attend` in order into out [rows, heads, v_dim]; `sinks` are scores of heads that have no
// value, or null. Grid: heads, rows.
__global__ void merge_attention(const float *part, const float *sinks, float *out, int splits, int v_dim) {
    long long head = (long long)blockIdx.y * gridDim.x + blockIdx.x;
    part += head * splits * (v_dim + 2);
    float top = -INFINITY, total = 0;
    for (int s = 0; s < splits; s++) top = fmaxf(top, part[s * (v_dim + 2)]);
    for (int s = 0; s < splits; s++) {
        const float *p = part + s * (v_dim + 2);
        total += p[0] == -INFINITY ? 0 : p[1] * expf(p[0] - top);
    }
    if (sinks) total += expf(sinks[blockIdx.x] - top);
    for (int i = threadIdx.x; i < v_dim; i += blockDim.x) {
        float value = 0;
        for (int s = 0; s < splits; s++) {
            const float *p = part + s * (v_dim + 2);
            value += p[0] == -INFINITY ? 0 : p[2 + i] * expf(p[0] - top);
        }
        out[head * v_dim + i] = value / total;
    }
}

// QUERIES rows of one query head over all KV cells, CELLS at a time, by online softmax: FlashAttention's order (Dao et
// al. 2022), for batches of many rows. Keys, then values, of a chunk pass through shared memory; thread t sums columns
// t, t + 128, ... of every row. Chunks that the mask hides from all rows are skipped. Grid: heads, rows / QUERIES.
template <class T, int MOST, int QUERIES, int CELLS>
__global__ void attend_many(const float *q, const typename T::type *keys, const typename T::type *values,
                            const u16 *mask, const float *sinks, float *out, int rows, int kv_heads, int k_dim,
                            int v_dim, int v_width, int n_kv, float scale, float softcap) {
    const int PARTS = (MOST + 32 * WARPS - 1) / (32 * WARPS);
    __shared__ float query[QUERIES][MOST], cell[CELLS][MOST + 1], weight[QUERIES][CELLS];
    __shared__ float maximum[QUERIES], sum[QUERIES], keep[QUERIES];
    __shared__ int visible;
    int t = threadIdx.x, head = blockIdx.x, kv_head = head / (gridDim.x / kv_heads), first = blockIdx.y * QUERIES;
    int count = rows - first < QUERIES ? rows - first : QUERIES;
    for (int i = t; i < count * k_dim; i += blockDim.x)
        query[i / k_dim][i % k_dim] =
            q[((long long)(first + i / k_dim) * gridDim.x + head) * k_dim + i % k_dim] * scale;
    if (t < QUERIES) maximum[t] = -INFINITY, sum[t] = 0;
    float acc[QUERIES][PARTS];
    for (int r = 0; r < QUERIES; r++)
        for (int j = 0; j < PARTS; j++) acc[r][j] = 0;
    for (int start = 0; start < n_kv; start += CELLS) {
        int width = n_kv - start < CELLS ? n_kv - start : CELLS;
        __syncthreads();  // the chunk before has been used
        if (t == 0) visible = 0;
        __syncthreads();
        for (int i = t; i < count * CELLS; i += blockDim.x) {
            int r = i / CELLS, c = i % CELLS;
            float bias = c < width ? half_to_float(mask[(long long)(first + r) * n_kv + start + c]) : -INFINITY;
            weight[r][c] = bias;
            if (bias != -INFINITY) visible = 1;
        }
        __syncthreads();
        if (!visible) continue;
        for (int i = t; i < width * k_dim; i += blockDim.x)
            cell[i / k_dim][i % k_dim] =
                T::get(keys[((long long)(start + i / k_dim) * kv_heads + kv_head) * k_dim + i % k_dim]);
        __syncthreads();
        for (int i = t; i < count * CELLS; i += blockDim.x) {
            int r = i / CELLS, c = i % CELLS;
            if (weight[r][c] == -INFINITY) continue;
            float score = 0;
            for (int d = 0; d < k_dim; d++) score += query[r][d] * cell[c][d];
            weight[r][c] += softcapped(score, softcap);
        }
        __syncthreads();
        if (t < count) {
            float above = maximum[t], total = 0;
            for (int c = 0; c < CELLS; c++) above = fmaxf(above, weight[t][c]);
            keep[t] = maximum[t] == -INFINITY ? 0 : expf(maximum[t] - above);
            for (int c = 0; c < CELLS; c++) {
                float w = weight[t][c] == -INFINITY ? 0 : expf(weight[t][c] - above);
                weight[t][c] = w;
                total += w;
            }
            maximum[t] = above;
            sum[t] = sum[t] * keep[t] + total;
        }
        for (int i = t; i < width * v_dim; i += blockDim.x)
            cell[i / v_dim][i % v_dim] =
                T::get(values[(long long)(start + i / v_dim) * v_width + kv_head * v_dim + i % v_dim]);
        __syncthreads();
#pragma unroll
        for (int r = 0; r < QUERIES; r++) {
            if (r >= count) break;
#pragma unroll
            for (int j = 0; j < PARTS; j++) acc[r][j] *= keep[r];
            for (int c = 0; c < width; c++) {
                float w = weight[r][c];
                if (w == 0) continue;  // what no row sees may never have been written
#pragma unroll
                for (int j = 0; j < PARTS; j++)
                    if (t + 32 * WARPS * j < v_dim) acc[r][j] += w * cell[c][t + 32 * WARPS * j];
            }
        }
    }
#pragma unroll
    for (int r = 0; r < QUERIES; r++)
#pragma unroll
        for (int j = 0; j < PARTS; j++) {
            int d = t + 32 * WARPS * j;
            if (r < count && d < v_dim)
                out[((long long)(first + r) * gridDim.x + head) * v_dim + d] =
                    acc[r][j] / (sum[r] + (sinks ? expf(sinks[head] - maximum[r]) : 0));
        }
}
