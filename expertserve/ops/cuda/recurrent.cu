// Recurrent layers: a convolution's and a recurrence's state by slot, carried along the runs of a batch.
//
// A run is source slot (-1: zeros), target slot, first row, row after the last. Runs are taken in order, because one
// may start from the state that another leaves.

#define MOST_TAPS 8
#define MOST_KEY 256
#define COLUMNS 32

// Depthwise convolution over the rows of each run; states are [slot, width - 1, channels]. Grid: channels / 128.
__global__ void causal_conv(const float *x, const float *weight, float *states, const int *runs, const int *num_runs,
                            float *out, int channels, int width) {
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= channels) return;
    float seen[MOST_TAPS], taps[MOST_TAPS];
    for (int j = 0; j < MOST_TAPS; j++) taps[j] = j < width ? weight[(long long)c * width + j] : 0;
    for (int run = 0; run < *num_runs; run++) {
        long long source = runs[4 * run], target = runs[4 * run + 1];
        for (int j = 0; j < MOST_TAPS; j++)
            seen[j] = j < width - 1 && source >= 0 ? states[(source * (width - 1) + j) * channels + c] : 0;
        for (int row = runs[4 * run + 2]; row < runs[4 * run + 3]; row++) {
            float sum = 0;
#pragma unroll
            for (int j = 0; j < MOST_TAPS; j++) {
                if (j == width - 1) seen[j] = x[(long long)row * channels + c];
                sum += seen[j] * taps[j];
            }
#pragma unroll
            for (int j = 0; j < MOST_TAPS - 1; j++) seen[j] = seen[j + 1];
            out[(long long)row * channels + c] = sum;
        }
#pragma unroll
        for (int j = 0; j < MOST_TAPS; j++)
            if (j < width - 1) states[(target * (width - 1) + j) * channels + c] = seen[j];
    }
}

__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0) + log1pf(expf(-fabsf(x))); }

// The gated delta rule (arXiv:2412.06464) over the rows of each run; states are [slot, value head, key_dim, value_dim].
// A block has COLUMNS columns of one head's state, warp w of it rows w, w + WARPS, ... in registers.
// Grid: value heads, value_dim / COLUMNS.
__global__ void gated_delta(const float *qkv, const float *alpha, const float *beta, const float *a, float *states,
                            const int *runs, const int *num_runs, float *out, int key_heads, int key_dim, int value_dim,
                            int grouped, float eps) {
    __shared__ float q[MOST_KEY], k[MOST_KEY], dots[WARPS][COLUMNS], sums[WARPS][COLUMNS], inverse[2];
    int head = blockIdx.x, heads = gridDim.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int column = blockIdx.y * COLUMNS + lane, keys = key_heads * key_dim;
    int key_at = (grouped ? head / (heads / key_heads) : head % key_heads) * key_dim;
    long long width = 2 * keys + heads * value_dim;
    bool mine = column < value_dim;
    float s[MOST_KEY / WARPS];
    for (int run = 0; run < *num_runs; run++) {
        long long source = runs[4 * run], target = runs[4 * run + 1];
#pragma unroll
        for (int j = 0; j < MOST_KEY / WARPS; j++) {
            int i = warp + WARPS * j;
            bool stored = mine && i < key_dim && source >= 0;
            s[j] = stored ? states[((source * heads + head) * key_dim + i) * value_dim + column] : 0;
        }
        for (int row = runs[4 * run + 2]; row < runs[4 * run + 3]; row++) {
            const float *x = qkv + row * width;
            __syncthreads();  // the row before has been read
            for (int i = threadIdx.x; i < key_dim; i += blockDim.x) q[i] = x[key_at + i], k[i] = x[keys + key_at + i];
            __syncthreads();
            if (warp < 2) {
                float squares = 0;
                for (int i = lane; i < key_dim; i += 32) squares += warp ? k[i] * k[i] : q[i] * q[i];
                squares = warp_sum(squares);
                if (lane == 0) inverse[warp] = 1 / fmaxf(sqrtf(squares), eps);
            }
            __syncthreads();
            float decay = expf(a[head] * softplus(alpha[row * heads + head])), dot = 0;
#pragma unroll
            for (int j = 0; j < MOST_KEY / WARPS; j++)
                if (warp + WARPS * j < key_dim) {
                    s[j] *= decay;
                    dot += k[warp + WARPS * j] * s[j];
                }
            dots[warp][lane] = dot;
            __syncthreads();
            dot = 0;
            for (int w = 0; w < WARPS; w++) dot += dots[w][lane];
            float v = mine ? x[2 * keys + head * value_dim + column] : 0;
            float change = sigmoid(beta[row * heads + head]) * (v - dot * inverse[1]) * inverse[1], sum = 0;
#pragma unroll
            for (int j = 0; j < MOST_KEY / WARPS; j++)
                if (warp + WARPS * j < key_dim) {
                    s[j] += k[warp + WARPS * j] * change;
                    sum += q[warp + WARPS * j] * s[j];
                }
            sums[warp][lane] = sum;
            __syncthreads();
            if (warp == 0 && mine) {
                sum = 0;
                for (int w = 0; w < WARPS; w++) sum += sums[w][lane];
                out[((long long)row * heads + head) * value_dim + column] = sum * inverse[0] / sqrtf(key_dim);
            }
        }
#pragma unroll
        for (int j = 0; j < MOST_KEY / WARPS; j++) {
            int i = warp + WARPS * j;
            if (mine && i < key_dim) states[((target * heads + head) * key_dim + i) * value_dim + column] = s[j];
        }
    }
}

// Mamba-2's recurrence (arXiv:2405.21060) over the rows of each run; states are [slot, head, state_dim, head_dim]. A
// block has COLUMNS columns of one head's state, as above. Grid: heads, head_dim / COLUMNS.
__global__ void selective_scan(const float *xbc, const float *dt, const float *a, const float *d, float *states,
                               const int *runs, const int *num_runs, float *out, int groups, int state_dim,
                               int head_dim) {
    __shared__ float b[MOST_KEY], c[MOST_KEY], sums[WARPS][COLUMNS];
    int head = blockIdx.x, heads = gridDim.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int column = blockIdx.y * COLUMNS + lane, inner = heads * head_dim;
    int group_at = inner + head / (heads / groups) * state_dim;
    long long width = inner + 2 * groups * state_dim;
    bool mine = column < head_dim;
    float s[MOST_KEY / WARPS];
    for (int run = 0; run < *num_runs; run++) {
        long long source = runs[4 * run], target = runs[4 * run + 1];
#pragma unroll
        for (int j = 0; j < MOST_KEY / WARPS; j++) {
            int i = warp + WARPS * j;
            bool stored = mine && i < state_dim && source >= 0;
            s[j] = stored ? states[((source * heads + head) * state_dim + i) * head_dim + column] : 0;
        }
        for (int row = runs[4 * run + 2]; row < runs[4 * run + 3]; row++) {
            const float *in = xbc + row * width;
            __syncthreads();  // the row before has been read
            for (int i = threadIdx.x; i < state_dim; i += blockDim.x)
                b[i] = in[group_at + i], c[i] = in[group_at + groups * state_dim + i];
            __syncthreads();
            float step = softplus(dt[row * heads + head]), decay = expf(a[head] * step), sum = 0;
            float x = mine ? in[head * head_dim + column] : 0;
#pragma unroll
            for (int j = 0; j < MOST_KEY / WARPS; j++)
                if (warp + WARPS * j < state_dim) {
                    s[j] = decay * s[j] + step * b[warp + WARPS * j] * x;
                    sum += c[warp + WARPS * j] * s[j];
                }
            sums[warp][lane] = sum;
            __syncthreads();
            if (warp == 0 && mine) {
                sum = d[head] * x;
                for (int w = 0; w < WARPS; w++) sum += sums[w][lane];
                out[(long long)row * inner + head * head_dim + column] = sum;
            }
        }
#pragma unroll
        for (int j = 0; j < MOST_KEY / WARPS; j++) {
            int i = warp + WARPS * j;
            if (mine && i < state_dim) states[((target * heads + head) * state_dim + i) * head_dim + column] = s[j];
        }
    }
}
