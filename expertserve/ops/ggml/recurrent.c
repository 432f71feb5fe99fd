/*
 * Recurrent layers as custom operators: a causal convolution, the gated delta rule and Mamba-2's scan, each with a state a
 * sequence.
 *
 * States lie in slots. A run is a stretch of a batch's rows that belongs to one sequence: it starts from the state in its
 * source slot (or from zero) and leaves its state in its target slot, which no earlier run of the step reads, so that a step
 * that fails has changed nothing that is still needed. Runs are walked in order, and a row is computed from the state and its
 * own inputs alone: neither the batch around it nor the number of threads matters.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "export.h"

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDEST
#endif

enum { MAX_DIM = 256, NO_STATE = -1 };

struct ggml_tensor;

struct run {
    int32_t source, target; /* slots */
    int32_t start, end;     /* rows */
};

struct conv_call {
    void **x;            /* where the tensors keep their data pointers: [rows, channels] */
    void **out;          /* [rows, channels] */
    const float *weight; /* [channels, width], the newest input last */
    float *states;       /* [slots, width - 1, channels], the oldest input first */
    const struct run *runs;
    const int32_t *num_runs;
    int32_t channels, width;
};

struct delta_call {
    void **qkv;     /* [rows, 2 * key_heads * key_dim + value_heads * value_dim] */
    void **alpha;   /* [rows, value_heads] */
    void **beta;    /* [rows, value_heads] */
    void **out;     /* [rows, value_heads * value_dim] */
    const float *a; /* [value_heads] */
    float *states;  /* [slots, value_heads, key_dim, value_dim] */
    const struct run *runs;
    const int32_t *num_runs;
    float eps;
    int32_t key_heads, value_heads, key_dim, value_dim, grouped;
};

struct scan_call {
    void **xbc;     /* [rows, heads * head_dim + 2 * groups * state_dim] */
    void **dt;      /* [rows, heads] */
    void **out;     /* [rows, heads * head_dim] */
    const float *a; /* [heads] */
    const float *d; /* [heads] */
    float *states;  /* [slots, heads, state_dim, head_dim] */
    const struct run *runs;
    const int32_t *num_runs;
    int32_t heads, groups, head_dim, state_dim;
};

WIDEST static void convolve(const struct conv_call *c, int c0, int c1) {
    const int64_t channels = c->channels, before = c->width - 1;
    const float *x = *c->x;
    float *out = *c->out;
    for (int32_t r = 0; r < *c->num_runs; r++) {
        const struct run run = c->runs[r];
        const float *old = run.source == NO_STATE ? 0 : c->states + run.source * before * channels;
        float *kept = c->states + run.target * before * channels;
        for (int64_t row = run.start; row < run.end; row++) {
            float *o = out + row * channels;
            memset(o + c0, 0, (size_t)(c1 - c0) * sizeof *o);
            for (int64_t j = 0; j <= before; j++) {
                const int64_t at = row - before + j; /* the row whose input this is; before the run, a place in the state */
                const float *in = at >= run.start ? x + at * channels
                                  : old           ? old + (at - run.start + before) * channels
                                                  : 0;
                if (!in) continue;
                for (int i = c0; i < c1; i++) o[i] += in[i] * c->weight[i * (int64_t)c->width + j];
            }
        }
        for (int64_t j = 0; j < before; j++) {
            const int64_t at = run.end - before + j;
            float *to = kept + j * channels;
            const float *in = at >= run.start ? x + at * channels
                              : old           ? old + (at - run.start + before) * channels
                                              : 0;
            if (in)
                memcpy(to + c0, in + c0, (size_t)(c1 - c0) * sizeof *to);
            else
                memset(to + c0, 0, (size_t)(c1 - c0) * sizeof *to);
        }
    }
}

/* to = x / max(|x|, eps) * scale */
static void normalise(const float *x, int n, float eps, float scale, float *to) {
    float sum = 0;
    for (int i = 0; i < n; i++) sum += x[i] * x[i];
    const float factor = scale / fmaxf(sqrtf(sum), eps);
    for (int i = 0; i < n; i++) to[i] = x[i] * factor;
}

/* One token: S = decay * S; S += k (beta * (v - k S)); o = q S, with S [key_dim, value_dim]. */
WIDEST static void update(float *s, const float *q, const float *k, const float *v, float decay, float beta, int key_dim,
                          int value_dim, float *o) {
    float change[MAX_DIM];
    memset(change, 0, (size_t)value_dim * sizeof *change);
    for (int i = 0; i < key_dim; i++) {
        float *row = s + (int64_t)i * value_dim;
        for (int j = 0; j < value_dim; j++) {
            row[j] *= decay;
            change[j] += k[i] * row[j];
        }
    }
    for (int j = 0; j < value_dim; j++) {
        change[j] = beta * (v[j] - change[j]);
        o[j] = 0;
    }
    for (int i = 0; i < key_dim; i++) {
        float *row = s + (int64_t)i * value_dim;
        for (int j = 0; j < value_dim; j++) {
            row[j] += k[i] * change[j];
            o[j] += q[i] * row[j];
        }
    }
}

static float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

/* What state number i of a run's target slot, of `count` of `size` values each, starts from. */
static float *begin_state(float *states, struct run run, int64_t i, int64_t count, int64_t size) {
    float *s = states + (run.target * count + i) * size;
    if (run.source == NO_STATE)
        memset(s, 0, (size_t)size * sizeof *s);
    else
        memcpy(s, states + (run.source * count + i) * size, (size_t)size * sizeof *s);
    return s;
}

static void delta_head(const struct delta_call *c, int head) {
    const int64_t keys = (int64_t)c->key_heads * c->key_dim, width = 2 * keys + (int64_t)c->value_heads * c->value_dim;
    const int64_t size = (int64_t)c->key_dim * c->value_dim;
    const int key_head = c->grouped ? head / (c->value_heads / c->key_heads) : head % c->key_heads;
    const float scale = 1.0f / sqrtf((float)c->key_dim);
    float q[MAX_DIM], k[MAX_DIM];
    for (int32_t r = 0; r < *c->num_runs; r++) {
        const struct run run = c->runs[r];
        float *s = begin_state(c->states, run, head, c->value_heads, size);
        for (int64_t row = run.start; row < run.end; row++) {
            const float *in = (const float *)*c->qkv + row * width;
            const float alpha = ((const float *)*c->alpha)[row * c->value_heads + head];
            const float beta = ((const float *)*c->beta)[row * c->value_heads + head];
            normalise(in + (int64_t)key_head * c->key_dim, c->key_dim, c->eps, scale, q);
            normalise(in + keys + (int64_t)key_head * c->key_dim, c->key_dim, c->eps, 1.0f, k);
            update(s, q, k, in + 2 * keys + (int64_t)head * c->value_dim, expf(c->a[head] * softplus(alpha)),
                   1.0f / (1.0f + expf(-beta)), c->key_dim, c->value_dim,
                   (float *)*c->out + (row * c->value_heads + head) * c->value_dim);
        }
    }
}

/* One token: S = decay * S + step * b x; o = c S + d x, with S [state_dim, head_dim]. */
WIDEST static void scan(float *s, const float *x, const float *b, const float *c, float decay, float step, float d,
                        int state_dim, int head_dim, float *o) {
    for (int j = 0; j < head_dim; j++) o[j] = d * x[j];
    for (int i = 0; i < state_dim; i++) {
        float *row = s + (int64_t)i * head_dim;
        for (int j = 0; j < head_dim; j++) {
            row[j] = decay * row[j] + step * b[i] * x[j];
            o[j] += c[i] * row[j];
        }
    }
}

static void scan_head(const struct scan_call *c, int head) {
    const int64_t inner = (int64_t)c->heads * c->head_dim, size = (int64_t)c->state_dim * c->head_dim;
    const int64_t group = head / (c->heads / c->groups), width = inner + 2 * (int64_t)c->groups * c->state_dim;
    for (int32_t r = 0; r < *c->num_runs; r++) {
        const struct run run = c->runs[r];
        float *s = begin_state(c->states, run, head, c->heads, size);
        for (int64_t row = run.start; row < run.end; row++) {
            const float *x = (const float *)*c->xbc + row * width, *b = x + inner + group * c->state_dim;
            const float step = softplus(((const float *)*c->dt)[row * c->heads + head]);
            scan(s, x + (int64_t)head * c->head_dim, b, b + (int64_t)c->groups * c->state_dim, expf(c->a[head] * step), step,
                 c->d[head], c->state_dim, c->head_dim, (float *)*c->out + row * inner + (int64_t)head * c->head_dim);
        }
    }
}

EXPORT void causal_conv(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
    const struct conv_call *c = userdata;
    const int part = (c->channels + nth - 1) / nth, c0 = ith * part;
    (void)dst;
    if (c0 < c->channels) convolve(c, c0, c0 + part < c->channels ? c0 + part : c->channels);
}

EXPORT void gated_delta(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
    const struct delta_call *c = userdata;
    (void)dst;
    for (int head = ith; head < c->value_heads; head += nth) delta_head(c, head);
}

EXPORT void selective_scan(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
    const struct scan_call *c = userdata;
    (void)dst;
    for (int head = ith; head < c->heads; head += nth) scan_head(c, head);
}

EXPORT int max_state_dim(void) { return MAX_DIM; }
EXPORT int64_t conv_call_bytes(void) { return sizeof(struct conv_call); }
EXPORT int64_t delta_call_bytes(void) { return sizeof(struct delta_call); }
EXPORT int64_t scan_call_bytes(void) { return sizeof(struct scan_call); }
