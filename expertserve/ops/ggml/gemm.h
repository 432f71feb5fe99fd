/*
 * Matrix products of quantised weights with many activation rows.
 *
 * ggml's dot products unpack a weight row again for every activation row. Here eight weight rows are unpacked once into a
 * tile and then meet every activation row ("column") of the call. One kernel serves all formats whose blocks are 32 wide;
 * a format is a function that fills a tile.
 */
#ifndef EXPERTSERVE_GEMM_H
#define EXPERTSERVE_GEMM_H

#include <stddef.h>
#include <stdint.h>

enum { TILE_ROWS = 8, SUB = 32 };

/* 32 weights of each of eight rows: weight = scale * q + offset. Rows are interleaved in pieces of eight bytes, and the
 * scales stand in the order in which the kernel's horizontal add leaves the rows. */
struct tile_block {
    uint8_t q[TILE_ROWS * SUB];
    float scale[TILE_ROWS];
    float offset[TILE_ROWS];
};

typedef void (*unpack_fn)(struct tile_block *tile, const void *row, int row_in_tile, int64_t columns);

/* How weights of one type become tiles; NULL unpack: no tiled kernel for this type on this processor. */
struct tile_format {
    unpack_fn unpack;
    int is_signed; /* q holds int8 and offset is zero; else q holds uint8 of at most 5 bits */
};

/* Formats of activation rows that ggml quantises to. */
enum column_format { COLUMN_Q8_K = 1, COLUMN_Q8_0 = 2, COLUMN_Q8_1 = 3 };

/* Bytes of one activation row as the kernel reads it: int8 q[n], float d[n / 32], float sum[n / 32] (d times the sum of q). */
static inline int64_t column_bytes(int64_t n) { return n + n / SUB * 2 * (int64_t)sizeof(float); }

void column_from_ggml(void *column, const void *row, int64_t n, enum column_format format);

/* Activation columns, and where the products of each go: column c is base + index[c] / divide * stride, or base + c * stride
 * where there is no index. */
struct columns {
    const char *base;
    int64_t stride;
    const int32_t *index;
    int32_t divide;
};
struct outputs {
    float *base;
    int64_t stride; /* in floats */
    const int32_t *index;
};

enum { MAX_TILES = 4 };

/* Weight rows [row0, row1), a multiple of TILE_ROWS and at most MAX_TILES * TILE_ROWS, times `count` columns of n elements;
 * the product of row r and column c goes to element r of output c. `scratch` holds MAX_TILES * n / SUB blocks. */
void rows_times_columns(const struct tile_format *format, const char *weights, int64_t row_bytes, int row0, int row1,
                        int64_t n, struct columns in, struct outputs out, int count, struct tile_block *scratch);

#endif
