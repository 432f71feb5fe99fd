/* Tiles: unpacking of each weight format, and the kernel that multiplies them. */
#include "gemm.h"

#include <string.h>

#include "export.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_TILES 1
#include <immintrin.h>
#else
#define HAVE_TILES 0
#endif

static const int LANE[TILE_ROWS] = {0, 1, 4, 5, 2, 3, 6, 7}; /* where the horizontal add leaves row r; its own inverse */

static float half_to_float(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
    uint32_t bits;
    float value;
    if (exponent == 0) {
        value = (float)fraction * (1.0f / 16777216.0f);
        return sign ? -value : value;
    }
    bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
    memcpy(&value, &bits, 4);
    return value;
}

static float read_half(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, 2);
    return half_to_float(h);
}

static uint64_t read_8(const uint8_t *p) {
    uint64_t v;
    memcpy(&v, p, 8);
    return v;
}

/* Piece j (8 weights) of a row within a block. */
static void put_8(struct tile_block *b, int row, int j, uint64_t v) {
    memcpy(b->q + row / 4 * 128 + j * 32 + row % 4 * 8, &v, 8);
}

static void put_scale(struct tile_block *b, int row, float scale, float offset) {
    b->scale[LANE[row]] = scale;
    b->offset[LANE[row]] = offset;
}

/* Q8_0: half d; int8 q[32]. */
static void unpack_q8_0(struct tile_block *tile, const void *data, int row, int64_t n) {
    const uint8_t *p = data;
    for (int64_t i = 0; i < n / SUB; i++, p += 34) {
        put_scale(tile + i, row, read_half(p), 0);
        for (int j = 0; j < 4; j++) {
            put_8(tile + i, row, j, read_8(p + 2 + 8 * j));
        }
    }
}

#define LOW_NIBBLES 0x0f0f0f0f0f0f0f0full

/* Q4_0: half d; 32 nibbles q, low ones first; weight d * (q - 8). */
static void unpack_q4_0(struct tile_block *tile, const void *data, int row, int64_t n) {
    const uint8_t *p = data;
    for (int64_t i = 0; i < n / SUB; i++, p += 18) {
        const float d = read_half(p);
        put_scale(tile + i, row, d, -8 * d);
        for (int j = 0; j < 2; j++) {
            const uint64_t v = read_8(p + 2 + 8 * j);
            put_8(tile + i, row, j, v & LOW_NIBBLES);
            put_8(tile + i, row, j + 2, v >> 4 & LOW_NIBBLES);
        }
    }
}

/* The 6-bit scale and minimum of sub-block i in the 12 packed bytes of Q4_K and Q5_K. */
static void scale_and_min(const uint8_t *s, int i, int *scale, int *min) {
    if (i < 4) {
        *scale = s[i] & 63;
        *min = s[i + 4] & 63;
    } else {
        *scale = (s[i + 4] & 15) | s[i - 4] >> 6 << 4;
        *min = s[i + 4] >> 4 | s[i] >> 6 << 4;
    }
}

/* Q4_K and Q5_K: half d, dmin; 12 bytes of scales; with 5 bits 32 bytes of high bits; 128 bytes of nibbles. */
static void unpack_k(struct tile_block *tile, const uint8_t *p, int row, int64_t n, int high_bits) {
    const int block_bytes = high_bits ? 176 : 144;
    for (int64_t i = 0; i < n / 256; i++, p += block_bytes, tile += 8) {
        const float d = read_half(p), dmin = read_half(p + 2);
        const uint8_t *high = p + 16, *nibbles = p + (high_bits ? 48 : 16);
        for (int sub = 0; sub < 8; sub++) {
            int scale, min;
            scale_and_min(p + 4, sub, &scale, &min);
            put_scale(tile + sub, row, d * (float)scale, -dmin * (float)min);
            for (int j = 0; j < 4; j++) {
                uint64_t v = read_8(nibbles + sub / 2 * 32 + 8 * j) >> (sub & 1) * 4 & LOW_NIBBLES;
                if (high_bits) {
                    v |= (read_8(high + 8 * j) >> sub & 0x0101010101010101ull) << 4;
                }
                put_8(tile + sub, row, j, v);
            }
        }
    }
}

static void unpack_q4_k(struct tile_block *tile, const void *row, int r, int64_t n) { unpack_k(tile, row, r, n, 0); }
static void unpack_q5_k(struct tile_block *tile, const void *row, int r, int64_t n) { unpack_k(tile, row, r, n, 1); }

void column_from_ggml(void *column, const void *row, int64_t n, enum column_format format) {
    int8_t *q = column;
    float *d = (float *)(q + n), *sum = d + n / SUB;
    const uint8_t *p = row;
    for (int64_t i = 0; i < n / SUB; i++) {
        int total = 0;
        if (format == COLUMN_Q8_K) { /* float d; int8 q[256]; int16 sums[16] */
            const uint8_t *block = p + i / 8 * 292;
            memcpy(d + i, block, 4);
            memcpy(q + i * SUB, block + 4 + i % 8 * SUB, SUB);
        } else { /* half d; with Q8_1 half sum; int8 q[32] */
            const int head = format == COLUMN_Q8_0 ? 2 : 4;
            const uint8_t *block = p + i * (head + SUB);
            d[i] = read_half(block);
            memcpy(q + i * SUB, block + head, SUB);
        }
        for (int k = 0; k < SUB; k++) {
            total += q[i * SUB + k];
        }
        sum[i] = d[i] * (float)total;
    }
}

#if HAVE_TILES

enum { COLUMNS = 4 };

#define AVX2 __attribute__((target("avx2,fma")))

/* Dot products of eight rows with one column's 32 elements, as eight int32 in LANE order. */
AVX2 static inline __m256i dots_unsigned(const __m256i w[8], const int8_t *y) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i low = _mm256_setzero_si256(), high = _mm256_setzero_si256();
    for (int j = 0; j < 4; j++) {
        const __m256i x = _mm256_set1_epi64x((long long)read_8((const uint8_t *)y + 8 * j));
        low = _mm256_add_epi16(low, _mm256_maddubs_epi16(w[j], x));
        high = _mm256_add_epi16(high, _mm256_maddubs_epi16(w[j + 4], x));
    }
    return _mm256_hadd_epi32(_mm256_madd_epi16(low, ones), _mm256_madd_epi16(high, ones));
}

AVX2 static inline __m256i dots_signed(const __m256i w[8], const int8_t *y) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i low = _mm256_setzero_si256(), high = _mm256_setzero_si256();
    for (int j = 0; j < 4; j++) {
        const __m256i x = _mm256_set1_epi64x((long long)read_8((const uint8_t *)y + 8 * j));
        const __m256i l = _mm256_maddubs_epi16(_mm256_abs_epi8(w[j]), _mm256_sign_epi8(x, w[j]));
        const __m256i h = _mm256_maddubs_epi16(_mm256_abs_epi8(w[j + 4]), _mm256_sign_epi8(x, w[j + 4]));
        low = _mm256_add_epi32(low, _mm256_madd_epi16(l, ones));
        high = _mm256_add_epi32(high, _mm256_madd_epi16(h, ones));
    }
    return _mm256_hadd_epi32(low, high);
}

#define DEFINE_TILE_KERNEL(NAME, DOTS, HAS_OFFSET)                                                                    \
    AVX2 static void NAME(const struct tile_block *tile, int64_t n, const char *const *columns, float *const *out,    \
                          int count) {                                                                                \
        __m256 acc[COLUMNS];                                                                                          \
        for (int c = 0; c < COLUMNS; c++) acc[c] = _mm256_setzero_ps();                                               \
        for (int64_t i = 0; i < n / SUB; i++) {                                                                       \
            __m256i w[8];                                                                                             \
            const __m256 scale = _mm256_loadu_ps(tile[i].scale), offset = _mm256_loadu_ps(tile[i].offset);            \
            for (int j = 0; j < 4; j++) {                                                                             \
                w[j] = _mm256_loadu_si256((const __m256i *)(tile[i].q + 32 * j));                                     \
                w[j + 4] = _mm256_loadu_si256((const __m256i *)(tile[i].q + 128 + 32 * j));                           \
            }                                                                                                         \
            for (int c = 0; c < COLUMNS; c++) {                                                                       \
                const int8_t *q = (const int8_t *)columns[c < count ? c : 0];                                         \
                const float *d = (const float *)(q + n);                                                              \
                const __m256 dot = _mm256_cvtepi32_ps(DOTS(w, q + i * SUB));                                          \
                acc[c] = _mm256_fmadd_ps(dot, _mm256_mul_ps(scale, _mm256_broadcast_ss(d + i)), acc[c]);              \
                if (HAS_OFFSET) acc[c] = _mm256_fmadd_ps(offset, _mm256_broadcast_ss(d + n / SUB + i), acc[c]);       \
            }                                                                                                         \
        }                                                                                                             \
        for (int c = 0; c < count; c++) {                                                                             \
            const __m256d lanes = _mm256_castps_pd(acc[c]);                                                           \
            _mm256_storeu_ps(out[c], _mm256_castpd_ps(_mm256_permute4x64_pd(lanes, 0xD8)));                           \
        }                                                                                                             \
    }

DEFINE_TILE_KERNEL(tile_unsigned, dots_unsigned, 1)
DEFINE_TILE_KERNEL(tile_signed, dots_signed, 0)

static void tile_times_columns(const struct tile_format *format, const struct tile_block *tile, int64_t n,
                               const char *const *columns, float *const *out, int count) {
    for (int c = 0; c < count; c += COLUMNS) {
        const int some = count - c < COLUMNS ? count - c : COLUMNS;
        (format->is_signed ? tile_signed : tile_unsigned)(tile, n, columns + c, out + c, some);
    }
}

static int have_tiles(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

#else

static void tile_times_columns(const struct tile_format *format, const struct tile_block *tile, int64_t n,
                               const char *const *columns, float *const *out, int count) {
    (void)format, (void)tile, (void)n, (void)columns, (void)out, (void)count;
}

static int have_tiles(void) { return 0; }

#endif

enum { COLUMN_CHUNK = 32 }; /* columns that stay in cache while the tiles pass over them */

void rows_times_columns(const struct tile_format *format, const char *weights, int64_t row_bytes, int row0, int row1,
                        int64_t n, struct columns in, struct outputs out, int count, struct tile_block *scratch) {
    for (int r = row0; r < row1; r++) {
        struct tile_block *tile = scratch + (r - row0) / TILE_ROWS * (n / SUB);
        format->unpack(tile, weights + r * row_bytes, (r - row0) % TILE_ROWS, n);
    }
    for (int c0 = 0; c0 < count; c0 += COLUMN_CHUNK) {
        const char *columns[COLUMN_CHUNK];
        float *to[COLUMN_CHUNK], *products[COLUMN_CHUNK];
        const int some = count - c0 < COLUMN_CHUNK ? count - c0 : COLUMN_CHUNK;
        for (int c = 0; c < some; c++) {
            columns[c] = in.base + (in.index ? in.index[c0 + c] / in.divide : c0 + c) * in.stride;
            to[c] = out.base + (out.index ? out.index[c0 + c] : c0 + c) * out.stride;
        }
        for (int r = row0; r < row1; r += TILE_ROWS) {
            for (int c = 0; c < some; c++) {
                products[c] = to[c] + r;
            }
            tile_times_columns(format, scratch + (r - row0) / TILE_ROWS * (n / SUB), n, columns, products, some);
        }
    }
}

/* The tiled kernel of a ggml weight type, by ggml's number of the type; unpack is NULL where there is none. */
EXPORT struct tile_format tile_format_of(int ggml_type) {
    static const struct { int type; struct tile_format format; } FORMATS[] = {
        {2, {unpack_q4_0, 0}}, {8, {unpack_q8_0, 1}}, {12, {unpack_q4_k, 0}}, {13, {unpack_q5_k, 0}},
    };
    const struct tile_format none = {NULL, 0};
    if (have_tiles()) {
        for (size_t i = 0; i < sizeof FORMATS / sizeof FORMATS[0]; i++) {
            if (FORMATS[i].type == ggml_type) {
                return FORMATS[i].format;
            }
        }
    }
    return none;
}
