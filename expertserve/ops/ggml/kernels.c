/*
 * Kernels that run on ggml's threads as custom operators: routed experts, and dense products with many rows.
 *
 * A call describes (token, expert) pairs grouped by expert, each expert's slices given by address, so that experts may lie
 * in any slots. An expert's pairs are always in one group; few are computed by ggml's own dot products, many by the tiled
 * kernel. Either way a product depends on its weight row and its activation row alone, so the slots, the split of a layer
 * into calls and the number of threads cannot change a bit of the result.
 *
 * Work is handed out in small items by an atomic counter, so that a thread that lost its core slows the others little.
 */
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "export.h"
#include "gemm.h"

struct ggml_tensor;

typedef void (*quantize_fn)(const float *x, void *y, int64_t n);
typedef void (*dot_fn)(int n, float *s, size_t bs, const void *x, size_t bx, const void *y, size_t by, int nrc);
typedef void (*gated_fn)(int n, float *y, const float *gate, const float *up);

enum {
    ROWS_PER_ITEM = MAX_TILES * TILE_ROWS, /* weight rows of one work item */
    PAIRS_PER_TILE = 16,                   /* activation rows that stay in cache in the one-by-one kernel */
    MIN_COLUMNS = 8                        /* below this, unpacking a tile costs more than it saves */
};

/* One weight matrix: its dot product, the activation format that wants, and its tiled kernel where there is one. */
struct matrix {
    dot_fn dot;
    quantize_fn quantize;    /* NULL: activations stay float */
    int64_t row_bytes;       /* of one weight row */
    int64_t input_row_bytes; /* of one activation row in the dot product's format */
    struct tile_format tile;
    int64_t column_format;   /* enum column_format of the activation rows, 0 without tiles */
};

struct expert_call {
    /* set for every call */
    int32_t num_groups;
    int32_t num_pairs;
    int32_t num_rows;          /* rows of x */
    int32_t input_is_new;      /* x must be converted */
    const uint64_t *gate;      /* [num_groups] address of the expert's first row */
    const uint64_t *up;
    const uint64_t *down;
    const int32_t *experts;     /* [num_groups] the expert's number, for its biases */
    const int32_t *group_start; /* [num_groups + 1] */
    const int32_t *pairs;       /* [num_pairs] token * top_k + j */
    /* set once */
    int32_t top_k;
    int32_t hidden;
    int32_t ffn;
    float limit;               /* above 0: of silu(gate), from above, and of up, both ways */
    struct matrix gate_m, up_m, down_m;
    gated_fn gated;
    const float *gate_bias; /* [experts] rows of outer_bias_stride, or NULL */
    const float *up_bias;
    const float *down_bias; /* [experts, hidden], or NULL */
    int64_t outer_bias_stride;
    const float *input_weights; /* [rows, top_k] what the products of gate and up are multiplied by, or NULL */
    const float *x;     /* [rows, hidden] */
    float *y;           /* [rows * top_k, hidden] */
    void *x_gate;       /* x in the format of gate_m; x itself where that is float */
    void *x_up;         /* likewise; the same memory where the formats are equal */
    char *gate_columns; /* x as columns of the tiled kernel */
    char *up_columns;
    float *gate_up;     /* [num_pairs, 2, ffn] */
    void *h;            /* [num_pairs] rows in the format of down_m */
    char *down_columns; /* [num_pairs] */
    char *scratch;      /* scratch_bytes a thread */
    int64_t scratch_bytes;
    atomic_int next_gate_up, next_activation, next_down;
};

static int min_int(int a, int b) { return a < b ? a : b; }

/* Row r of x in the dot product's format, and as a column where the tiled kernel may want it. */
static void convert_row(const struct matrix *m, const float *x, int n, int64_t r, void *rows, char *columns, int tiled) {
    char *row = (char *)rows + r * m->input_row_bytes;
    m->quantize(x, row, n);
    if (tiled && m->tile.unpack) {
        column_from_ggml(columns + r * column_bytes(n), row, n, (enum column_format)m->column_format);
    }
}

static void convert_input(struct expert_call *c, const struct matrix *m, void *rows, char *columns, int ith, int nth) {
    for (int r = ith; m->quantize && r < c->num_rows; r += nth) {
        convert_row(m, c->x + (int64_t)r * c->hidden, c->hidden, r, rows, columns, c->num_rows >= MIN_COLUMNS);
    }
}

EXPORT void expert_input(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
    struct expert_call *c = userdata;
    (void)dst;
    if (ith == 0) {
        atomic_store(&c->next_gate_up, 0);
        atomic_store(&c->next_activation, 0);
        atomic_store(&c->next_down, 0);
    }
    if (c->input_is_new) {
        convert_input(c, &c->gate_m, c->x_gate, c->gate_columns, ith, nth);
        if (c->x_up != c->x_gate || c->up_columns != c->gate_columns) {
            convert_input(c, &c->up_m, c->x_up, c->up_columns, ith, nth);
        }
    }
}

/* Weight rows [row0, row1) of one expert times the pairs [p0, p1) of its group. */
static void product(const struct matrix *m, const char *weights, int row0, int row1, int n, const char *rows,
                    struct columns in, struct outputs out, int count, char *scratch) {
    if (count >= MIN_COLUMNS && m->tile.unpack && (row1 - row0) % TILE_ROWS == 0) {
        rows_times_columns(&m->tile, weights, m->row_bytes, row0, row1, n, in, out, count, (struct tile_block *)scratch);
        return;
    }
    for (int p0 = 0; p0 < count; p0 += PAIRS_PER_TILE) {
        const int p1 = min_int(p0 + PAIRS_PER_TILE, count);
        for (int r = row0; r < row1; r++) {
            for (int p = p0; p < p1; p++) {
                const int64_t from = in.index ? in.index[p] / in.divide : p, to = out.index ? out.index[p] : p;
                m->dot(n, out.base + to * out.stride + r, 0, weights + r * m->row_bytes, 0, rows + from * m->input_row_bytes, 0, 1);
            }
        }
    }
}

/* Multiplies elements [row0, row1) of each pair's output by the pair's weight. */
static void weigh(const float *weights, const int32_t *pairs, int row0, int row1, struct outputs out, int count) {
    for (int p = 0; weights && p < count; p++) {
        float *o = out.base + p * out.stride;
        for (int r = row0; r < row1; r++) o[r] *= weights[pairs[p]];
    }
}

/* Adds an expert's bias to elements [row0, row1) of `count` outputs. */
static void add_bias(const float *bias, int row0, int row1, struct outputs out, int count) {
    for (int p = 0; bias && p < count; p++) {
        float *o = out.base + (out.index ? out.index[p] : p) * out.stride;
        for (int r = row0; r < row1; r++) o[r] += bias[r];
    }
}

static const float *row_of(const float *bias, int64_t row, int64_t stride) { return bias ? bias + row * stride : NULL; }

/* Whether experts have a gate of their own; else `gate` is `up`. */
static int has_gate(const struct expert_call *c) { return c->gate != c->up; }

EXPORT void expert_gate_up(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
    struct expert_call *c = userdata;
    const int blocks = (c->ffn + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM;
    const int items = blocks * c->num_groups;
    char *scratch = c->scratch + ith * c->scratch_bytes;
    (void)dst, (void)nth;
    for (int item; (item = atomic_fetch_add(&c->next_gate_up, 1)) < items;) {
        const int group = item / blocks;
        const int row0 = item % blocks * ROWS_PER_ITEM, row1 = min_int(row0 + ROWS_PER_ITEM, c->ffn);
        const int p0 = c->group_start[group], count = c->group_start[group + 1] - p0;
        float *outer = c->gate_up + (int64_t)p0 * 2 * c->ffn;
        const struct outputs gate_out = {outer, 2 * c->ffn, NULL}, up_out = {outer + c->ffn, 2 * c->ffn, NULL};
        const int64_t column = column_bytes(c->hidden);
        if (has_gate(c)) {
            product(&c->gate_m, (const char *)(uintptr_t)c->gate[group], row0, row1, c->hidden, c->x_gate,
                    (struct columns){c->gate_columns, column, c->pairs + p0, c->top_k},
                    gate_out, count, scratch);
        }
        product(&c->up_m, (const char *)(uintptr_t)c->up[group], row0, row1, c->hidden, c->x_up,
                (struct columns){c->up_columns, column, c->pairs + p0, c->top_k},
                up_out, count, scratch);
        weigh(c->input_weights, c->pairs + p0, row0, row1, gate_out, count);
        weigh(c->input_weights, c->pairs + p0, row0, row1, up_out, count);
        add_bias(row_of(c->gate_bias, c->experts[group], c->outer_bias_stride), row0, row1, gate_out, count);
        add_bias(row_of(c->up_bias, c->experts[group], c->outer_bias_stride), row0, row1, up_out, count);
    }
}

/* y = g * sigmoid(1.702 g) * (u + 1), g and u limited; y may be gate. */
EXPORT void gated_swiglu_oai(int n, float *y, const float *gate, const float *up) {
    for (int i = 0; i < n; i++) {
        const float g = fminf(gate[i], 7.0f), u = fmaxf(fminf(up[i], 7.0f), -7.0f);
        y[i] = g / (1.0f + expf(-1.702f * g)) * (u + 1.0f);
    }
}

/* y = gelu(gate) * up, by the tanh form; y may be gate. */
EXPORT void gated_gelu(int n, float *y, const float *gate, const float *up) {
    for (int i = 0; i < n; i++) {
        const float g = gate[i], inner = 0.79788456f * g * (1.0f + 0.044715f * g * g);
        y[i] = 0.5f * g * (1.0f + tanhf(inner)) * up[i];
    }
}

/* y = max(gate, 0) * up; y may be gate. */
EXPORT void gated_relu(int n, float *y, const float *gate, const float *up) {
    for (int i = 0; i < n; i++) y[i] = fmaxf(gate[i], 0.0f) * up[i];
}

/* y = min(silu(gate), limit) * up, with up in [-limit, limit]; y may be gate. */
static void gated_swiglu_limited(int n, float *y, const float *gate, const float *up, float limit) {
    for (int i = 0; i < n; i++) {
        const float silu = gate[i] / (1.0f + expf(-gate[i]));
        y[i] = fminf(silu, limit) * fmaxf(fminf(up[i], limit), -limit);
    }
}

EXPORT void expert_activation(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
    struct expert_call *c = userdata;
    (void)dst, (void)ith, (void)nth;
    for (int p; (p = atomic_fetch_add(&c->next_activation, 1)) < c->num_pairs;) {
        float *gate = c->gate_up + (int64_t)p * 2 * c->ffn;
        if (c->limit > 0) {
            gated_swiglu_limited(c->ffn, gate, gate, gate + c->ffn, c->limit);
        } else {
            c->gated(c->ffn, gate, has_gate(c) ? gate : gate + c->ffn, gate + c->ffn);
        }
        if (c->down_m.quantize) {
            convert_row(&c->down_m, gate, c->ffn, p, c->h, c->down_columns, c->num_pairs >= MIN_COLUMNS);
        } else {
            memcpy((char *)c->h + p * c->down_m.input_row_bytes, gate, (size_t)c->ffn * sizeof(float));
        }
    }
}

EXPORT void expert_down(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
    struct expert_call *c = userdata;
    const int blocks = (c->hidden + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM;
    const int items = blocks * c->num_groups;
    char *scratch = c->scratch + ith * c->scratch_bytes;
    (void)dst, (void)nth;
    for (int item; (item = atomic_fetch_add(&c->next_down, 1)) < items;) {
        const int group = item / blocks;
        const int row0 = item % blocks * ROWS_PER_ITEM, row1 = min_int(row0 + ROWS_PER_ITEM, c->hidden);
        const int p0 = c->group_start[group], count = c->group_start[group + 1] - p0;
        const struct outputs out = {c->y, c->hidden, c->pairs + p0};
        const int64_t column = column_bytes(c->ffn);
        product(&c->down_m, (const char *)(uintptr_t)c->down[group], row0, row1, c->ffn,
                (const char *)c->h + p0 * c->down_m.input_row_bytes,
                (struct columns){c->down_columns + p0 * column, column, NULL, 1}, out, count, scratch);
        add_bias(row_of(c->down_bias, c->experts[group], c->hidden), row0, row1, out, count);
    }
}

/* A dense weight times many rows; tensors are reached through the places where they keep their data pointers. */
struct linear_call {
    struct matrix m;
    const char *weights;
    void **x;       /* [rows, n] */
    void **columns; /* [rows] columns, then one row of the dot product's format a thread */
    void **out;     /* [rows, num_outputs] */
    char *scratch;
    int64_t scratch_bytes;
    int32_t n, rows, num_outputs;
    atomic_int next;
};

EXPORT void linear_input(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
    struct linear_call *c = userdata;
    char *columns = *c->columns;
    char *row = columns + c->rows * column_bytes(c->n) + ith * c->m.input_row_bytes;
    (void)dst;
    if (ith == 0) {
        atomic_store(&c->next, 0);
    }
    for (int64_t r = ith; r < c->rows; r += nth) {
        c->m.quantize((const float *)*c->x + r * c->n, row, c->n);
        column_from_ggml(columns + r * column_bytes(c->n), row, c->n, (enum column_format)c->m.column_format);
    }
}

EXPORT void linear_product(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
    struct linear_call *c = userdata;
    const int items = (c->num_outputs + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM;
    const struct columns in = {*c->columns, column_bytes(c->n), NULL, 1};
    const struct outputs out = {*c->out, c->num_outputs, NULL};
    (void)dst, (void)nth;
    for (int item; (item = atomic_fetch_add(&c->next, 1)) < items;) {
        const int row0 = item * ROWS_PER_ITEM, row1 = min_int(row0 + ROWS_PER_ITEM, c->num_outputs);
        rows_times_columns(&c->m.tile, c->weights, c->m.row_bytes, row0, row1, c->n, in, out, c->rows,
                           (struct tile_block *)(c->scratch + ith * c->scratch_bytes));
    }
}

struct combine_call {
    const float *y;       /* [rows, top_k, hidden] */
    const float *weights; /* [rows, top_k]; NULL where all are 1 */
    void **out;           /* where the output tensor keeps its data pointer: [rows, hidden] */
    int32_t rows, top_k, hidden, unused;
};

/* out[row] = sum over j, in order, of weights[row, j] * y[row, j]; each thread takes a range of columns. */
EXPORT void combine_experts(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
    const struct combine_call *c = userdata;
    const int columns = (c->hidden + nth - 1) / nth;
    const int c0 = min_int(ith * columns, c->hidden), c1 = min_int(c0 + columns, c->hidden);
    (void)dst;
    for (int row = 0; row < c->rows; row++) {
        float *o = (float *)*c->out + (int64_t)row * c->hidden;
        const float *y = c->y + (int64_t)row * c->top_k * c->hidden;
        for (int j = 0; j < c->top_k; j++, y += c->hidden) {
            const float w = c->weights ? c->weights[(int64_t)row * c->top_k + j] : 1;
            for (int i = c0; i < c1; i++) o[i] = j ? o[i] + w * y[i] : w * y[i];
        }
    }
}

/* Sizes of the structures above, so that a caller that declares them again can check itself. */
EXPORT int64_t expert_call_bytes(void) { return sizeof(struct expert_call); }
EXPORT int64_t linear_call_bytes(void) { return sizeof(struct linear_call); }
EXPORT int64_t combine_call_bytes(void) { return sizeof(struct combine_call); }
