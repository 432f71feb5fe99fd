// Products with quantised rows, and routed experts where they lie in slots.

#define TILE 8

// Values first .. first + 7 of a row of x; past the end, zeros.
__device__ __forceinline__ void load_x(const float *x, int first, int n, float *out) {
    if (first + 8 <= n && ((u64)(x + first) & 15) == 0) {
        float4 low = *(const float4 *)(x + first), high = *(const float4 *)(x + first + 4);
        out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
        out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
    } else
        for (int i = 0; i < 8; i++) out[i] = first + i < n ? x[first + i] : 0;
}

// Products of two weight rows with up to TILE rows of x, by one warp; every lane gets all sums. Two rows, because they
// share the loads of x and keep twice as many loads of weights under way.
template <class A, class B>
__device__ __forceinline__ void two_rows(const u8 *a, const u8 *b, const float *const *x, int count, int n,
                                         float *sums_a, float *sums_b) {
    for (int r = 0; r < TILE; r++) sums_a[r] = sums_b[r] = 0;
    for (int first = threadIdx.x % 32 * 8; first < n; first += 256) {
        float wa[8], wb[8];
        Row<A>::decode8(a, first, n, wa);
        Row<B>::decode8(b, first, n, wb);
#pragma unroll
        for (int r = 0; r < TILE; r++)
            if (r < count) {
                float values[8];
                load_x(x[r], first, n, values);
                for (int i = 0; i < 8; i++) sums_a[r] += wa[i] * values[i], sums_b[r] += wb[i] * values[i];
            }
    }
    for (int r = 0; r < TILE; r++)
        if (r < count) sums_a[r] = warp_sum(sums_a[r]), sums_b[r] = warp_sum(sums_b[r]);
}

// y[rows, heads, out] = x[rows, heads, in] * weight[heads, out, in]^T + bias[out], each head with its own matrix; an
// ordinary product has one head. Grid: out / (2 * WARPS), rows / TILE, heads.
template <class F>
__global__ void matvec(const u8 *weight, const float *x, const float *bias, float *y, int in, int out, int rows) {
    int o = (blockIdx.x * WARPS + threadIdx.x / 32) * 2, first = blockIdx.y * TILE;
    if (o >= out) return;
    int count = rows - first < TILE ? rows - first : TILE, width = o + 1 < out ? 2 : 1;
    long long heads = gridDim.z, head = blockIdx.z;
    const float *from[TILE];
    for (int r = 0; r < TILE; r++) from[r] = x + ((first + (r < count ? r : 0)) * heads + head) * in;
    const u8 *row = weight + (head * out + o) * row_bytes<F>(in);
    float sums[2][TILE];
    two_rows<F, F>(row, row + (width - 1) * row_bytes<F>(in), from, count, in, sums[0], sums[1]);
    if (threadIdx.x % 32 == 0)
        for (int r = 0; r < count; r++)
            for (int i = 0; i < width; i++)
                y[((first + r) * heads + head) * out + o + i] = sums[i][r] + (bias ? bias[o + i] : 0);
}

// out[rows, n] = rows `ids` of weight (all of them in order where ids is null). Grid: rows, n / (8 * 128).
template <class F> __global__ void take_rows(const u8 *weight, const int *ids, float *out, int n) {
    int first = (blockIdx.y * blockDim.x + threadIdx.x) * 8, row = blockIdx.x;
    if (first >= n) return;
    float w[8];
    Row<F>::decode8(weight + (ids ? ids[row] : row) * row_bytes<F>(n), first, n, w);
    for (int i = 0; i < 8 && first + i < n; i++) out[(long long)row * n + first + i] = w[i];
}

// h[pair, ffn] = the gated activation of gate x and up x for the pairs of each group. Biases are null or rows of
// bias_stride, an expert each; above 0, the limit is that of ExpertShape; input_weights are null or a factor a pair of both
// products. Grid: ffn / WARPS, groups.
template <class G, class U>
__global__ void expert_gate_up(const u64 *gate, const u64 *up, const int *experts, const int *group_start,
                               const int *pairs, const float *gate_bias, const float *up_bias,
                               const float *input_weights, const float *x, float *h, int hidden, int ffn, int top_k,
                               int bias_stride, int activation, float limit) {
    int f = blockIdx.x * WARPS + threadIdx.x / 32, group = blockIdx.y;
    if (f >= ffn) return;
    const u8 *gate_row = (const u8 *)gate[group] + f * row_bytes<G>(hidden);
    const u8 *up_row = (const u8 *)up[group] + f * row_bytes<U>(hidden);
    long long at = (long long)experts[group] * bias_stride + f;
    float more_gate = gate_bias ? gate_bias[at] : 0, more_up = up_bias ? up_bias[at] : 0;
    for (int first = group_start[group]; first < group_start[group + 1]; first += TILE) {
        int left = group_start[group + 1] - first, count = left < TILE ? left : TILE;
        const float *from[TILE];
        for (int r = 0; r < TILE; r++) from[r] = x + (long long)(pairs[first + (r < count ? r : 0)] / top_k) * hidden;
        float g[TILE], u[TILE];
        two_rows<G, U>(gate_row, up_row, from, count, hidden, g, u);
        if (threadIdx.x % 32 == 0)
            for (int r = 0; r < count; r++) {
                long long pair = pairs[first + r];
                float weight = input_weights ? input_weights[pair] : 1;
                float gate_value = weight * g[r] + more_gate, up_value = weight * u[r] + more_up;
                h[pair * ffn + f] = limit > 0 ? fminf(silu(gate_value), limit) * fmaxf(fminf(up_value, limit), -limit)
                                              : gated(activation, gate_value, up_value);
            }
    }
}

// y[pair, hidden] = down h[pair] + bias[expert, hidden] for the pairs of each group; the bias may be null.
// Grid: hidden / (2 * WARPS), groups.
template <class D>
__global__ void expert_down(const u64 *down, const int *experts, const int *group_start, const int *pairs,
                            const float *bias, const float *h, float *y, int hidden, int ffn) {
    int o = (blockIdx.x * WARPS + threadIdx.x / 32) * 2, group = blockIdx.y;
    if (o >= hidden) return;
    int width = o + 1 < hidden ? 2 : 1;
    const u8 *row = (const u8 *)down[group] + o * row_bytes<D>(ffn);
    float more[2] = {0, 0};
    for (int i = 0; i < width; i++) more[i] = bias ? bias[(long long)experts[group] * hidden + o + i] : 0;
    for (int first = group_start[group]; first < group_start[group + 1]; first += TILE) {
        int left = group_start[group + 1] - first, count = left < TILE ? left : TILE;
        const float *from[TILE];
        for (int r = 0; r < TILE; r++) from[r] = h + (long long)pairs[first + (r < count ? r : 0)] * ffn;
        float sums[2][TILE];
        two_rows<D, D>(row, row + (width - 1) * row_bytes<D>(ffn), from, count, ffn, sums[0], sums[1]);
        if (threadIdx.x % 32 == 0)
            for (int r = 0; r < count; r++)
                for (int i = 0; i < width; i++) y[(long long)pairs[first + r] * hidden + o + i] = sums[i][r] + more[i];
    }
}

// out[row] = sum over j of weights[row, j] * y[row, j], in order of j; null weights are 1. Grid: hidden / 128, rows.
__global__ void combine_experts(const float *weights, const float *y, float *out, int hidden, int top_k) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
    if (i >= hidden) return;
    float sum = 0;
    for (int j = 0; j < top_k; j++)
        sum += (weights ? weights[row * top_k + j] : 1) * y[((long long)row * top_k + j) * hidden + i];
    out[(long long)row * hidden + i] = sum;
}
