// Every GGUF block format, defined once: how many values a block holds, how many bytes, and how eight of them decode.
//
// A format F has F::VALUES, F::BYTES and F::decode8(block, first, out), which writes values first .. first + 7 of a
// block (`first` a multiple of 8). Blocks of quantised formats are read with loads no wider than their alignment.

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef CUDA_EMULATION
__device__ __forceinline__ float half_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
__device__ __forceinline__ u16 float_to_half(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

__device__ __forceinline__ float bits_to_float(u32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ u32 load16(const u8 *p) { return *(const u16 *)p; }
__device__ __forceinline__ float load_half(const u8 *p) { return half_to_float((u16)load16(p)); }

// Four bytes at p, which is a multiple of ALIGN.
template <int ALIGN> __device__ __forceinline__ u32 load32(const u8 *p) {
    if (ALIGN >= 4) return *(const u32 *)p;
    if (ALIGN == 2) return load16(p) | load16(p + 2) << 16;
    return p[0] | p[1] << 8 | p[2] << 16 | (u32)p[3] << 24;
}

// Byte i of two words.
struct Bytes8 {
    u32 low, high;
    __device__ __forceinline__ u32 at(int i) const { return (i < 4 ? low >> 8 * i : high >> 8 * (i - 4)) & 255; }
};

template <int ALIGN> __device__ __forceinline__ Bytes8 load8(const u8 *p) {
    Bytes8 bytes;
    bytes.low = load32<ALIGN>(p);
    bytes.high = load32<ALIGN>(p + 4);
    return bytes;
}

__device__ const i8 IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
__device__ const i8 E2M1_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct F32 {
    enum { VALUES = 1, BYTES = 4 };
    __device__ static void decode(const u8 *p, float *out) { *out = *(const float *)p; }
};
struct F16 {
    enum { VALUES = 1, BYTES = 2 };
    __device__ static void decode(const u8 *p, float *out) { *out = load_half(p); }
};
struct BF16 {
    enum { VALUES = 1, BYTES = 2 };
    __device__ static void decode(const u8 *p, float *out) { *out = bits_to_float(load16(p) << 16); }
};

// Blocks of 32: nibbles of values 0 .. 15 are low, of 16 .. 31 high.
struct Q4_0 {
    enum { VALUES = 32, BYTES = 18 };
    __device__ static void decode8(const u8 *b, int first, float *out) {
        float d = load_half(b);
        Bytes8 q = load8<2>(b + 2 + first % 16);
        for (int i = 0; i < 8; i++) out[i] = d * ((int)(q.at(i) >> (first / 16 * 4) & 15) - 8);
    }
};
struct Q4_1 {
    enum { VALUES = 32, BYTES = 20 };
    __device__ static void decode8(const u8 *b, int first, float *out) {
        float d = load_half(b), m = load_half(b + 2);
        Bytes8 q = load8<4>(b + 4 + first % 16);
        for (int i = 0; i < 8; i++) out[i] = d * (q.at(i) >> (first / 16 * 4) & 15) + m;
    }
};
struct Q5_0 {
    enum { VALUES = 32, BYTES = 22 };
    __device__ static void decode8(const u8 *b, int first, float *out) {
        float d = load_half(b);
        u32 fifth = load32<2>(b + 2) >> first;
        Bytes8 q = load8<2>(b + 6 + first % 16);
        for (int i = 0; i < 8; i++)
            out[i] = d * ((int)((q.at(i) >> (first / 16 * 4) & 15) | (fifth >> i & 1) << 4) - 16);
    }
};
struct Q5_1 {
    enum { VALUES = 32, BYTES = 24 };
    __device__ static void decode8(const u8 *b, int first, float *out) {
        float d = load_half(b), m = load_half(b + 2);
        u32 fifth = load32<4>(b + 4) >> first;
        Bytes8 q = load8<4>(b + 8 + first % 16);
        for (int i = 0; i < 8; i++) out[i] = d * ((q.at(i) >> (first / 16 * 4) & 15) | (fifth >> i & 1) << 4) + m;
    }
};
struct Q8_0 {
    enum { VALUES = 32, BYTES = 34 };
    __device__ static void decode8(const u8 *b, int first, float *out) {
        float d = load_half(b);
        Bytes8 q = load8<2>(b + 2 + first);
        for (int i = 0; i < 8; i++) out[i] = d * (i8)q.at(i);
    }
};
struct IQ4_NL {
    enum { VALUES = 32, BYTES = 18 };
    __device__ static void decode8(const u8 *b, int first, float *out) {
        float d = load_half(b);
        Bytes8 q = load8<2>(b + 2 + first % 16);
        for (int i = 0; i < 8; i++) out[i] = d * IQ4_VALUES[q.at(i) >> (first / 16 * 4) & 15];
    }
};
struct MXFP4 {
    enum { VALUES = 32, BYTES = 17 };
    __device__ static void decode8(const u8 *b, int first, float *out) {
        float d = ldexpf(1.0f, (int)b[0] - 128);
        Bytes8 q = load8<1>(b + 1 + first % 16);
        for (int i = 0; i < 8; i++) out[i] = d * E2M1_VALUES[q.at(i) >> (first / 16 * 4) & 15];
    }
};

// Superblocks of 256 values in sub-blocks of 16 or 32 with their own scales.
struct Q2_K {
    enum { VALUES = 256, BYTES = 84 };
    __device__ static void decode8(const u8 *b, int first, float *out) {
        int half = first / 128, pair = first % 128 / 32, at = first % 32;
        u32 scale = b[half * 8 + pair * 2 + at / 16];
        float d = load_half(b + 80) * (scale & 15), m = load_half(b + 82) * (scale >> 4);
        Bytes8 q = load8<4>(b + 16 + half * 32 + at);
        for (int i = 0; i < 8; i++) out[i] = d * (q.at(i) >> 2 * pair & 3) - m;
    }
};
struct Q3_K {
    enum { VALUES = 256, BYTES = 110 };
    __device__ static void decode8(const u8 *b, int first, float *out) {
        int half = first / 128, pair = first % 128 / 32, at = first % 32, sub = half * 8 + pair * 2 + at / 16;
        const u8 *scales = b + 96;
        int low = sub < 8 ? scales[sub] & 15 : scales[sub - 8] >> 4;
        int scale = low | (scales[8 + sub % 4] >> sub / 4 * 2 & 3) << 4;
        float d = load_half(b + 108) * (scale - 32);
        Bytes8 third = load8<2>(b + at), q = load8<2>(b + 32 + half * 32 + at);
        for (int i = 0; i < 8; i++)
            out[i] = d * ((int)((q.at(i) >> 2 * pair & 3) | (third.at(i) >> (4 * half + pair) & 1) << 2) - 4);
    }
};

// Scale and minimum of sub-block j of Q4_K and Q5_K: eight of each, of 6 bits, in 12 bytes.
__device__ __forceinline__ void scale_min(const u8 *s, int j, u32 &scale, u32 &minimum) {
    if (j < 4) {
        scale = s[j] & 63;
        minimum = s[j + 4] & 63;
    } else {
        scale = (s[j + 4] & 15) | s[j - 4] >> 6 << 4;
        minimum = s[j + 4] >> 4 | s[j] >> 6 << 4;
    }
}

struct Q4_K {
    enum { VALUES = 256, BYTES = 144 };
    __device__ static void decode8(const u8 *b, int first, float *out) {
        u32 scale, minimum;
        scale_min(b + 4, first / 32, scale, minimum);
        float d = load_half(b) * scale, m = load_half(b + 2) * minimum;
        Bytes8 q = load8<4>(b + 16 + first / 64 * 32 + first % 32);
        for (int i = 0; i < 8; i++) out[i] = d * (q.at(i) >> (first / 32 % 2 * 4) & 15) - m;
    }
};
struct Q5_K {
    enum { VALUES = 256, BYTES = 176 };
    __device__ static void decode8(const u8 *b, int first, float *out) {
        u32 scale, minimum;
        scale_min(b + 4, first / 32, scale, minimum);
        float d = load_half(b) * scale, m = load_half(b + 2) * minimum;
        Bytes8 fifth = load8<4>(b + 16 + first % 32), q = load8<4>(b + 48 + first / 64 * 32 + first % 32);
        for (int i = 0; i < 8; i++)
            out[i] = d * ((q.at(i) >> (first / 32 % 2 * 4) & 15) | (fifth.at(i) >> first / 32 & 1) << 4) - m;
    }
};
struct Q6_K {
    enum { VALUES = 256, BYTES = 210 };
    __device__ static void decode8(const u8 *b, int first, float *out) {
        int half = first / 128, pair = first % 128 / 32, at = first % 32;
        float d = load_half(b + 208) * (i8)b[192 + half * 8 + pair * 2 + at / 16];
        Bytes8 low = load8<2>(b + half * 64 + pair % 2 * 32 + at), high = load8<2>(b + 128 + half * 32 + at);
        for (int i = 0; i < 8; i++)
            out[i] = d * ((int)((low.at(i) >> pair / 2 * 4 & 15) | (high.at(i) >> 2 * pair & 3) << 4) - 32);
    }
};
struct IQ4_XS {
    enum { VALUES = 256, BYTES = 136 };
    __device__ static void decode8(const u8 *b, int first, float *out) {
        int sub = first / 32;
        int scale = (b[4 + sub / 2] >> sub % 2 * 4 & 15) | (load16(b + 2) >> 2 * sub & 3) << 4;
        float d = load_half(b) * (scale - 32);
        Bytes8 q = load8<4>(b + 8 + sub * 16 + first % 16);
        for (int i = 0; i < 8; i++) out[i] = d * IQ4_VALUES[q.at(i) >> (first % 32 / 16 * 4) & 15];
    }
};

// Codebook formats: an index names eight (IQ2, IQ1) or four (IQ3) magnitudes; tables are in grids.cuh.
__device__ __forceinline__ u32 even_signs(u32 seven) { return seven | (__popc(seven) & 1) << 7; }

__device__ __forceinline__ void codebook2(u32 code, u32 signs, float d, float *out) {
    for (int i = 0; i < 8; i++) {
        u32 digit = code >> 2 * i & 3;
        float value = d * (digit == 0 ? 8 : digit == 1 ? 25 : 43);
        out[i] = signs >> i & 1 ? -value : value;
    }
}
struct IQ2_XXS {
    enum { VALUES = 256, BYTES = 66 };
    __device__ static void decode8(const u8 *b, int first, float *out) {
        const u8 *q = b + 2 + first / 32 * 8;
        int at = first % 32 / 8;
        u32 tail = load32<2>(q + 4);
        float d = load_half(b) * (0.5f + (tail >> 28)) * 0.25f;
        codebook2(IQ2_XXS_GRID[q[at]], even_signs(tail >> 7 * at & 127), d, out);
    }
};
struct IQ2_XS {
    enum { VALUES = 256, BYTES = 74 };
    __device__ static void decode8(const u8 *b, int first, float *out) {
        u32 q = load16(b + 2 + first / 8 * 2), scale = b[66 + first / 32] >> first % 32 / 16 * 4 & 15;
        codebook2(IQ2_XS_GRID[q & 511], even_signs(q >> 9), load_half(b) * (0.5f + scale) * 0.25f, out);
    }
};
struct IQ2_S {
    enum { VALUES = 256, BYTES = 82 };
    __device__ static void decode8(const u8 *b, int first, float *out) {
        int at = first / 8;
        u32 index = b[2 + at] | (b[66 + at / 4] >> at % 4 * 2 & 3) << 8;
        u32 scale = b[74 + at / 4] >> at % 4 / 2 * 4 & 15;
        codebook2(IQ2_S_GRID[index], b[34 + at], load_half(b) * (0.5f + scale) * 0.25f, out);
    }
};
struct IQ3_XXS {
    enum { VALUES = 256, BYTES = 98 };
    __device__ static void decode8(const u8 *b, int first, float *out) {
        u32 tail = load32<2>(b + 66 + first / 32 * 4), signs = even_signs(tail >> 7 * (first % 32 / 8) & 127);
        float d = load_half(b) * (0.5f + (tail >> 28)) * 0.5f;
        for (int i = 0; i < 8; i++) {
            u32 digit = IQ3_XXS_GRID[b[2 + first / 4 + i / 4]] >> i % 4 * 3 & 7;
            float value = d * (digit == 7 ? 62 : 4 + 8 * (int)digit);
            out[i] = signs >> i & 1 ? -value : value;
        }
    }
};
struct IQ3_S {
    enum { VALUES = 256, BYTES = 110 };
    __device__ static void decode8(const u8 *b, int first, float *out) {
        int sub = first / 32, at = first % 32 / 8;
        float d = load_half(b) * (1 + 2 * (b[106 + sub / 2] >> sub % 2 * 4 & 15));
        u32 signs = b[74 + first / 8];
        for (int i = 0; i < 8; i++) {
            u32 index = b[2 + first / 4 + i / 4] | (b[66 + sub] >> (2 * at + i / 4) & 1) << 8;
            float value = d * (1 + 2 * (int)(IQ3_S_GRID[index] >> i % 4 * 3 & 7));
            out[i] = signs >> i & 1 ? -value : value;
        }
    }
};
struct IQ1_S {
    enum { VALUES = 256, BYTES = 50 };
    __device__ static void decode8(const u8 *b, int first, float *out) {
        int at = first % 32 / 8;
        u32 head = load16(b + 34 + first / 32 * 2), code = IQ1_GRID[b[2 + first / 8] | (head >> 3 * at & 7) << 8];
        float d = load_half(b) * (2 * (head >> 12 & 7) + 1), delta = head & 0x8000 ? -0.125f : 0.125f;
        for (int i = 0; i < 8; i++) out[i] = d * ((int)(code >> 2 * i & 3) - 1 + delta);
    }
};
struct IQ1_M {
    enum { VALUES = 256, BYTES = 56 };
    __device__ static void decode8(const u8 *b, int first, float *out) {
        int sub = first / 32, at = first % 32 / 8;
        const u8 *scales = b + 48;
        u32 whole = load16(scales) >> 12 | (load16(scales + 2) >> 8 & 0xf0) | (load16(scales + 4) >> 4 & 0xf00) |
                    (load16(scales + 6) & 0xf000);
        u32 scale = load16(scales + sub / 2 * 2) >> (sub % 2 * 6 + at / 2 * 3) & 7;
        u32 head = b[32 + sub * 2 + at / 2] >> at % 2 * 4;
        u32 code = IQ1_GRID[b[first / 8] | (head & 7) << 8];
        float d = half_to_float((u16)whole) * (2 * scale + 1), delta = head & 8 ? -0.125f : 0.125f;
        for (int i = 0; i < 8; i++) out[i] = d * ((int)(code >> 2 * i & 3) - 1 + delta);
    }
};

// Values first .. first + 7 of a row of n; past the end, zeros. Only unquantised rows can end inside the eight.
template <class F> struct Row {
    __device__ static __forceinline__ void decode8(const u8 *row, int first, int n, float *out) {
        F::decode8(row + (long long)(first / F::VALUES) * F::BYTES, first % F::VALUES, out);
    }
};
template <class F> struct PlainRow {
    __device__ static __forceinline__ void decode8(const u8 *row, int first, int n, float *out) {
        for (int i = 0; i < 8; i++) {
            out[i] = 0;
            if (first + i < n) F::decode(row + (long long)(first + i) * F::BYTES, out + i);
        }
    }
};
template <> struct Row<F32> : PlainRow<F32> {};
template <> struct Row<F16> : PlainRow<F16> {};
template <> struct Row<BF16> : PlainRow<BF16> {};

template <class F> __device__ __forceinline__ long long row_bytes(int n) {
    return (long long)(n / F::VALUES) * F::BYTES;
}
