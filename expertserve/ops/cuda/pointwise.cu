// Norms, rotation, and what is done value by value.

// The sum of a value of each thread of a block of WARPS warps, for all of them; `parts` is used for no other sum.
__device__ __forceinline__ float block_sum(float value, float *parts) {
    value = warp_sum(value);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    value = 0;
    for (int w = 0; w < WARPS; w++) value += parts[w];
    return value;
}

// RMS norm of rows of n values; weight may be null. Grid: rows; a block is WARPS warps.
__global__ void rms_norm(const float *x, const float *weight, float *out, int n, float eps) {
    __shared__ float parts[WARPS];
    x += (long long)blockIdx.x * n;
    out += (long long)blockIdx.x * n;
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += x[i] * x[i];
    float factor = 1 / sqrtf(block_sum(sum, parts) / n + eps);
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = x[i] * factor * (weight ? weight[i] : 1);
}

// Layer norm of rows of n values, without a bias. Grid: rows; a block is WARPS warps.
__global__ void layer_norm(const float *x, const float *weight, float *out, int n, float eps) {
    __shared__ float sums[WARPS], squares[WARPS];
    x += (long long)blockIdx.x * n;
    out += (long long)blockIdx.x * n;
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += x[i];
    float mean = block_sum(sum, sums) / n, square = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) square += (x[i] - mean) * (x[i] - mean);
    float factor = 1 / sqrtf(block_sum(square, squares) / n + eps);
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = (x[i] - mean) * factor * weight[i];
}

// Rotates the first 2 * half values of heads of x [rows, heads, dim]; neighbours pair up, or halves (neox). `frequency`
// is in double precision because it is multiplied by positions of many thousands. Grid: heads, rows.
__global__ void rope(const float *x, const int *positions, const double *frequency, float *out, int dim, int half,
                     int neox, float magnitude) {
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

// One value by one: out[i] = OP(a[i]).
struct Sigmoid {
    __device__ static float of(float a) { return sigmoid(a); }
};
struct Silu {
    __device__ static float of(float a) { return silu(a); }
};
struct Tanh {
    __device__ static float of(float a) { return tanhf(a); }
};
template <class OP> __global__ void unary(const float *a, float *out, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = OP::of(a[i]);
}

__global__ void scale(const float *a, float *out, int count, float factor) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = a[i] * factor;
}

__global__ void clamp(const float *a, float *out, int count, float most) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = fminf(fmaxf(a[i], -most), most);
}

// Two values: out[i] = OP(a[i], b[i / repeat % n]), so that b may be as long as a, one row of it, or one value a row.
struct Add {
    __device__ static float of(float a, float b) { return a + b; }
};
struct Mul {
    __device__ static float of(float a, float b) { return a * b; }
};
template <int KIND> struct Gated {
    __device__ static float of(float a, float b) { return gated(KIND, a, b); }
};
template <class OP> __global__ void binary(const float *a, const float *b, float *out, int count, int repeat, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = OP::of(a[i], b[i / repeat % n]);
}

// to[row, to_at + i] = from[row / repeat, from_at + i] for i < width. Grid: rows, width / 128 (only the
// first number of a grid may be above 65535).
__global__ void copy_columns(const float *from, float *to, int width, int repeat, int from_width, int from_at,
                             int to_width, int to_at) {
    int i = blockIdx.y * blockDim.x + threadIdx.x;
    long long row = blockIdx.x;
    if (i < width) to[row * to_width + to_at + i] = from[row / repeat * from_width + from_at + i];
}
