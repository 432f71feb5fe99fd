/*
 * Grouped-query attention over a half-precision KV cache, as a custom operator.
 *
 * ggml reads a K row again for every query head. Here a row is converted once for four query heads of its group, and cells
 * that a token does not see are left out before anything is computed. A token's result depends on its query and the cells it
 * sees, in their order, alone: neither the batch around it, nor the size of the cache, nor the number of threads matters.
 */
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "export.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_ATTENTION 1
#include <immintrin.h>
#else
#define HAVE_ATTENTION 0
#endif

struct ggml_tensor;

typedef double (*softmax_fn)(int n, float *y, const float *x, float max); /* y = exp(x - max); returns the sum of y */

struct attention_call {
    const char *k; /* [cells] rows of halves: all heads of a cell */
    const char *v;
    int64_t k_row_bytes;
    int64_t v_row_bytes;
    void **q;             /* where the tensors keep their data pointers: [rows, heads, k_dim] */
    void **out;           /* [rows, heads, v_dim] */
    const uint16_t *mask; /* [rows, n_kv] halves: zero where the token sees the cell */
    const float *sinks;   /* [heads] scores that have no value, or NULL */
    softmax_fn softmax;
    char *scratch; /* scratch_bytes a thread: (HEADS + 1) * n_kv words */
    int64_t scratch_bytes;
    float scale;
    int32_t rows, n_kv, heads, kv_heads, k_dim, v_dim;
    atomic_int next, left; /* the next item; threads that have no more */
};

enum { HEADS = 4 }; /* query heads that share a pass over the cache */

#if HAVE_ATTENTION

#define F16C __attribute__((target("avx2,fma,f16c")))

F16C static inline __m256 load_half(const char *row, int i) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(row + 2 * (int64_t)i)));
}

F16C static inline __m128 sums(const __m256 a[HEADS]) {
    const __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
    return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}

/* scores[h * n_kv + i] = scale * q[h] . K row of cell i, two cells at a time. */
F16C static void score(const struct attention_call *c, const float *const q[HEADS], const char *k, const int32_t *cells,
                       int count, float *scores) {
    for (int i = 0; i < count; i += 2) {
        const int j = i + 1 < count ? i + 1 : i;
        const char *first = k + cells[i] * c->k_row_bytes, *second = k + cells[j] * c->k_row_bytes;
        __m256 a[HEADS], b[HEADS];
        float to[2][HEADS];
        for (int h = 0; h < HEADS; h++) a[h] = b[h] = _mm256_setzero_ps();
        for (int d = 0; d < c->k_dim; d += 8) {
            const __m256 x = load_half(first, d), y = load_half(second, d);
            for (int h = 0; h < HEADS; h++) {
                const __m256 w = _mm256_loadu_ps(q[h] + d);
                a[h] = _mm256_fmadd_ps(w, x, a[h]);
                b[h] = _mm256_fmadd_ps(w, y, b[h]);
            }
        }
        const __m128 scale = _mm_set1_ps(c->scale);
        _mm_storeu_ps(to[0], _mm_mul_ps(sums(a), scale));
        _mm_storeu_ps(to[1], _mm_mul_ps(sums(b), scale));
        for (int h = 0; h < HEADS; h++) {
            scores[(int64_t)h * c->n_kv + i] = to[0][h];
            scores[(int64_t)h * c->n_kv + j] = to[1][h];
        }
    }
}

/* out[h] = factor[h] * sum over cells, in order, of weights[h * n_kv + i] times the V row of cell i. */
F16C static void mix(const struct attention_call *c, const float *weights, const char *v, const int32_t *cells, int count,
                     const float factor[HEADS], float *const out[HEADS], int heads) {
    for (int d = 0; d < c->v_dim; d += 16) {
        __m256 a[HEADS], b[HEADS];
        for (int h = 0; h < HEADS; h++) a[h] = b[h] = _mm256_setzero_ps();
        for (int i = 0; i < count; i++) {
            const char *row = v + cells[i] * c->v_row_bytes;
            const __m256 x = load_half(row, d), y = load_half(row, d + 8);
            for (int h = 0; h < HEADS; h++) {
                const __m256 w = _mm256_broadcast_ss(weights + (int64_t)h * c->n_kv + i);
                a[h] = _mm256_fmadd_ps(w, x, a[h]);
                b[h] = _mm256_fmadd_ps(w, y, b[h]);
            }
        }
        for (int h = 0; h < heads; h++) {
            const __m256 f = _mm256_set1_ps(factor[h]);
            _mm256_storeu_ps(out[h] + d, _mm256_mul_ps(a[h], f));
            _mm256_storeu_ps(out[h] + d + 8, _mm256_mul_ps(b[h], f));
        }
    }
}

/* At most HEADS query heads of one token, which share a KV head, over the cells the token sees. */
static void attend(const struct attention_call *c, int row, int head, int heads, const int32_t *cells, int count,
                   float *scores) {
    const int kv_head = head / (c->heads / c->kv_heads);
    const float *q[HEADS];
    float *out[HEADS], factor[HEADS];
    for (int h = 0; h < HEADS; h++) { /* heads that are not there repeat the first */
        const int64_t at = (int64_t)row * c->heads + head + (h < heads ? h : 0);
        q[h] = (const float *)*c->q + at * c->k_dim;
        out[h] = (float *)*c->out + at * c->v_dim;
    }
    score(c, q, c->k + 2 * (int64_t)kv_head * c->k_dim, cells, count, scores);
    for (int h = 0; h < HEADS; h++) {
        float *s = scores + (int64_t)h * c->n_kv;
        const float sink = c->sinks ? c->sinks[head + (h < heads ? h : 0)] : -INFINITY;
        float max = sink;
        for (int i = 0; i < count; i++) {
            max = s[i] > max ? s[i] : max;
        }
        factor[h] = (float)(1 / (c->softmax(count, s, s, max) + (c->sinks ? expf(sink - max) : 0.0f)));
    }
    mix(c, scores, c->v + 2 * (int64_t)kv_head * c->v_dim, cells, count, factor, out, heads);
}

EXPORT void attention(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
    struct attention_call *c = userdata;
    int32_t *cells = (int32_t *)(c->scratch + ith * c->scratch_bytes);
    float *scores = (float *)(cells + c->n_kv);
    const int group = c->heads / c->kv_heads, items = c->rows * c->kv_heads;
    (void)dst;
    for (int item; (item = atomic_fetch_add(&c->next, 1)) < items;) {
        const int row = item / c->kv_heads, first = item % c->kv_heads * group;
        const uint16_t *mask = c->mask + (int64_t)row * c->n_kv;
        int count = 0;
        for (int i = 0; i < c->n_kv; i++) {
            cells[count] = i;
            count += mask[i] == 0;
        }
        if (count == 0) {
            const int64_t at = ((int64_t)row * c->heads + first) * c->v_dim;
            memset((float *)*c->out + at, 0, (size_t)group * c->v_dim * sizeof(float));
            continue;
        }
        for (int h = 0; h < group; h += HEADS) {
            attend(c, row, first + h, group - h < HEADS ? group - h : HEADS, cells, count, scores);
        }
    }
    if (atomic_fetch_add(&c->left, 1) == nth - 1) { /* the last thread makes the call ready for its next run */
        atomic_store(&c->left, 0);
        atomic_store(&c->next, 0);
    }
}

EXPORT int have_attention(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

#else

EXPORT void attention(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
    (void)dst, (void)ith, (void)nth, (void)userdata;
}

EXPORT int have_attention(void) { return 0; }

#endif

EXPORT int64_t attention_call_bytes(void) { return sizeof(struct attention_call); }
