/* Llamas and Qwens on the CPU, for drafts and targets: a few rows of a tree at a time, or a prompt.

   A draft of 27 MB lies in the caches of a few cores. What a general engine spends on it is not arithmetic: it is building a graph,
   handing out hundreds of small operations and meeting after each. Here a layer is five stretches of work with a meeting after
   each, every thread keeps the same rows of every matrix (and so its part of the weights in its own cache), and threads spin.

   Weights are bytes or nibbles in blocks of 32 columns with a scale each (and, Q4_1 and Q4_K, a least value), repacked so that one
   vector holds four columns of LANES rows. Other types become bytes when they are loaded. Activations are bytes with a scale for each 32. Keys and values of committed tokens ("the trunk") are
   bfloat16: keys by LANES positions, values by position; those of guesses ("the tree") are float32.

   A draft need not be exact: a guess is a guess. A target must be: there (`exact`) the logits of a row are the same to the bit,
   whatever else is in its step and wherever its ancestors' keys lie. So attention goes in stretches of STRETCH positions, counted
   from the first, with the tree's keys, rounded as the trunk's are, put where their positions are; and this file is compiled without
   anything that lets a compiler change the order of sums. One process may have several models; one model serves one caller. */

#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Vectors are as long as registers are: longer ones would live in memory. */
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#define LANES 16          /* rows of a matrix that are computed together; positions in a block of keys */
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define VECTOR (4 * LANES) /* bytes */
#define BLOCK 32          /* columns with a common scale */
#define MOST_ROWS 256     /* tokens in a step */
#define FEW 16            /* rows that every thread prepares for itself: that is cheaper than a meeting */
#define STRETCH 64        /* positions that are attended to at once */
#define SHARED 4          /* rows of tokens whose queries share what is loaded of the keys */
#define EVENLY 8          /* stretches of key heads for each thread, of which one more or less does not matter */
#define TOGETHER 6        /* of their queries that do so at once; models have one, three or four for a key head */
#define WIDE (LANES == 16 ? 4 : 2) /* vectors of a value at once: as many as there are registers for */
#define AHEAD 4096         /* bytes of weights that are asked for before they are wanted */
#define ARENA ((size_t)32 << 20)
#define MOST_ARENAS 1024
#define PACKERS 16          /* threads that bring weights into their form, at most */
#define PACKED_ALONE 1000000 /* bytes of a matrix that are not worth one of them */
#define WIDEST_HEAD 256
#define MOST_ANCESTORS 1024
#define LIKELY 10.0f       /* below the largest logit; what lies deeper has no chance */
#define CONTENDERS 64     /* of the likely tokens, that guesses are chosen from */
#define NOTED 2048        /* likely tokens that one thread notes of a row; of more only the better ones */
#define MOST_THREADS 256
#define SPINS 4000        /* looks at a flag before the processor is given to somebody else */
#define NEVER (-1e30f)
#define HARDLY (-1e20f)   /* above NEVER: exp(NEVER - HARDLY) is 0 */

typedef float vf __attribute__((vector_size(VECTOR)));
typedef int32_t vi __attribute__((vector_size(VECTOR)));
typedef uint32_t vu __attribute__((vector_size(VECTOR)));
typedef uint8_t vb __attribute__((vector_size(VECTOR)));
typedef uint16_t vh __attribute__((vector_size(VECTOR / 2)));
typedef uint16_t vw __attribute__((vector_size(VECTOR)));
typedef float vf_any __attribute__((vector_size(VECTOR), aligned(4)));
typedef uint16_t vh_any __attribute__((vector_size(VECTOR / 2), aligned(2)));

#define INLINE static inline __attribute__((always_inline))

/* Numbers */

INLINE float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff, bits;
    if (rest >= 0x7c00) bits = 0x7f800000u | (rest & 0x3ff) << 13;
    else if (rest >= 0x400) bits = (rest << 13) + 0x38000000u;
    else {
        float small = (float)rest * 0x1p-24f;
        memcpy(&bits, &small, 4);
    }
    bits |= sign;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

INLINE uint16_t to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE float from_bf16(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

INLINE vf all(float x) { return x - (vf){0}; }
INLINE vf load(const float *p) { return *(const vf_any *)p; }
INLINE void store(float *p, vf v) { *(vf_any *)p = v; }
INLINE vf load_bf16(const uint16_t *p) { return (vf)(__builtin_convertvector((vh)*(const vh_any *)p, vu) << 16); }
INLINE vf pick(vi which, vf a, vf b) { return (vf)(((vi)a & which) | ((vi)b & ~which)); }
INLINE vf larger(vf a, vf b) { return pick(a > b, a, b); }

/* a * b + c, rounded once where the processor can: said here, for where sums must be exact a compiler may not decide. */
INLINE vf fused(vf a, vf b, vf c) {
#if LANES == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8 && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

#if defined(__has_builtin) && !defined(PLAIN_FOLD)
#if __has_builtin(__builtin_shufflevector)
#define SWAP(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#if LANES == 16
#define FOLD(v, with)                                                                                                              \
    v = with(v, SWAP(v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));                                                    \
    v = with(v, SWAP(v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));                                                    \
    v = with(v, SWAP(v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));                                                    \
    v = with(v, SWAP(v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
#elif LANES == 8
#define FOLD(v, with)                                                                                                              \
    v = with(v, SWAP(v, 4, 5, 6, 7, 0, 1, 2, 3));                                                                                  \
    v = with(v, SWAP(v, 2, 3, 0, 1, 6, 7, 4, 5));                                                                                  \
    v = with(v, SWAP(v, 1, 0, 3, 2, 5, 4, 7, 6));
#else
#define FOLD(v, with)                                                                                                              \
    v = with(v, SWAP(v, 2, 3, 0, 1));                                                                                              \
    v = with(v, SWAP(v, 1, 0, 3, 2));
#endif
#endif
#endif
#ifndef FOLD
#define FOLD(v, with)                                                                                                              \
    const vf lanes = v;                                                                                                            \
    for (int lane = 1; lane < LANES; lane++) {                                                                                     \
        const vf other = all(lanes[lane]);                                                                                         \
        v = with(v, other);                                                                                                        \
    }
#endif

INLINE vf added(vf a, vf b) { return a + b; }

INLINE float sum(vf v) {
    FOLD(v, added)
    return v[0];
}

INLINE float largest(vf v) {
    FOLD(v, larger)
    return v[0];
}

/* Within 2e-7 of e^x; 0 for what is too small. */
INLINE vf exponential(vf x) {
    vf t = larger(x * 1.44269504f, all(-126.0f));
    t = pick(t < 126.0f, t, all(126.0f));
    vi power = __builtin_convertvector(t + 126.5f, vi) - 126; /* to the nearest: what is converted is positive */
    vf r = (t - __builtin_convertvector(power, vf)) * 0.69314718f;
    vf p = fused(r, all(0.00138888889f), all(0.00833333333f));
    p = fused(p, r, all(0.0416666667f));
    p = fused(p, r, all(0.166666667f));
    p = fused(p, r, all(0.5f));
    p = fused(p, r, all(1.0f));
    p = fused(p, r, all(1.0f));
    return pick(t > -126.0f, (vf)((vi)p + (power << 23)), all(0.0f));
}

/* Bytes times bytes. A vector of weights has four columns of LANES rows. */

#if LANES == 16
#define OFFSET 128 /* weights are kept unsigned */
INLINE vi dot_bytes(vi total, vb weights, int32_t four) {
    return (vi)_mm512_dpbusd_epi32((__m512i)total, (__m512i)weights, _mm512_set1_epi32(four));
}
INLINE vi dot_nibbles(vi total, vb weights, int32_t four) { return dot_bytes(total, weights, four); }
#elif defined(__AVXVNNI__)
#define OFFSET 128
INLINE vi dot_bytes(vi total, vb weights, int32_t four) {
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)total, (__m256i)weights, _mm256_set1_epi32(four));
}
INLINE vi dot_nibbles(vi total, vb weights, int32_t four) { return dot_bytes(total, weights, four); }
#elif defined(__AVX2__)
#define OFFSET 0 /* signed: their sizes, and their signs on the other side, so that a sum of two products stays inside 16 bits */
INLINE vi pairs(vi total, __m256i a, __m256i b) {
    return (vi)_mm256_add_epi32((__m256i)total, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
}
INLINE vi dot_bytes(vi total, vb weights, int32_t four) {
    return pairs(total, _mm256_abs_epi8((__m256i)weights), _mm256_sign_epi8(_mm256_set1_epi32(four), (__m256i)weights));
}
INLINE vi dot_nibbles(vi total, vb weights, int32_t four) { return pairs(total, (__m256i)weights, _mm256_set1_epi32(four)); }
#else
#define OFFSET 128
INLINE vi dot_bytes(vi total, vb weights, int32_t four) {
    int8_t a[4];
    memcpy(a, &four, 4);
    for (int r = 0; r < LANES; r++)
        total[r] += weights[4 * r] * a[0] + weights[4 * r + 1] * a[1] + weights[4 * r + 2] * a[2] + weights[4 * r + 3] * a[3];
    return total;
}
INLINE vi dot_nibbles(vi total, vb weights, int32_t four) { return dot_bytes(total, weights, four); }
#endif

/* Matrices */

#if defined(__F16C__) && LANES > 4
typedef uint16_t scale_type; /* half precision, as in the file */
#if LANES == 16
INLINE vf load_scales(const scale_type *p) { return (vf)_mm512_cvtph_ps(*(const __m256i *)p); }
#else
INLINE vf load_scales(const scale_type *p) { return (vf)_mm256_cvtph_ps(*(const __m128i *)p); }
#endif
INLINE scale_type to_scale(float f) { return _cvtss_sh(f, 0); }
#else
typedef float scale_type;
INLINE vf load_scales(const scale_type *p) { return *(const vf *)p; }
INLINE scale_type to_scale(float f) { return f; }
#endif

enum { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, BF16 = 30 }; /* as in GGUF */
enum { BYTES, NIBBLES, NIBBLES_ABOVE }; /* how weights are kept: whole numbers around 0; the same; from a least value upwards */

typedef struct {
    int rows, columns, kept, units; /* a unit: LANES rows */
    uint8_t *quants;
    scale_type *scales, *least; /* (units, columns / BLOCK, LANES); `least` only where weights are above one */
} matrix;

typedef struct {
    uint8_t *begin[MOST_ARENAS], *next;
    size_t left;
    int count;
} arena;

typedef struct { /* of some rows of tokens */
    int columns;
    int8_t *quants;
    float *scales;
    int32_t *sums;
} bytes;

static size_t row_bytes(int type, int columns) {
    switch (type) {
    case Q8_0: return (size_t)columns / BLOCK * 34;
    case Q4_0: return (size_t)columns / BLOCK * 18;
    case Q4_1: return (size_t)columns / BLOCK * 20;
    case Q5_0: return (size_t)columns / BLOCK * 22;
    case Q5_1: return (size_t)columns / BLOCK * 24;
    case Q4_K: return (size_t)columns / 256 * 144;
    case Q5_K: return (size_t)columns / 256 * 176;
    case Q6_K: return (size_t)columns / 256 * 210;
    case F32: return (size_t)columns * 4;
    default: return (size_t)columns * 2;
    }
}

static int how_kept(int type) { return type == Q4_0 ? NIBBLES : type == Q4_1 || type == Q4_K ? NIBBLES_ABOVE : BYTES; }

typedef struct { /* 32 columns of one row: a weight is least + scale * whole */
    float scale, least;
    int whole[BLOCK];
} block;

INLINE float half_at(const uint8_t *p) {
    uint16_t half;
    memcpy(&half, p, 2);
    return half_to_float(half);
}

/* Nibbles: first the low halves of 16 bytes, then the high ones. */
INLINE void split(const uint8_t *p, int *whole) {
    for (int i = 0; i < 16; i++) whole[i] = p[i] & 15, whole[i + 16] = p[i] >> 4;
}

/* The fifth bits. */
INLINE void add_fifth(const uint8_t *p, int *whole) {
    uint32_t bits;
    memcpy(&bits, p, 4);
    for (int i = 0; i < BLOCK; i++) whole[i] |= (int)(bits >> i & 1) << 4;
}

/* Q4_K and Q5_K: eight blocks share two halves, by which their scales and least values, six bits each, are to be multiplied. */
static void read_shared(int type, const uint8_t *p, int part, block *out) {
    const uint8_t *six = p + 4, *nibbles = p + (type == Q5_K ? 48 : 16) + part / 2 * BLOCK;
    int scale = six[part] & 63, least = six[part + 4] & 63;
    if (part >= 4) {
        scale = (six[part + 4] & 15) | six[part - 4] >> 6 << 4;
        least = six[part + 4] >> 4 | six[part] >> 6 << 4;
    }
    out->scale = half_at(p) * scale, out->least = -half_at(p + 2) * least;
    for (int i = 0; i < BLOCK; i++) {
        out->whole[i] = nibbles[i] >> (part % 2 ? 4 : 0) & 15;
        if (type == Q5_K) out->whole[i] |= (p[16 + i] >> part & 1) << 4;
    }
}

/* Q6_K: four bits in one place, two in another, and a scale for 16 columns. Floats, since a block of 32 has one. */
static void read_six(const uint8_t *p, int part, float *x) {
    const int half = part / 4, quarter = part % 4;
    const uint8_t *four = p + 64 * half + BLOCK * (quarter % 2), *two = p + 128 + BLOCK * half;
    const int8_t *scales = (const int8_t *)p + 192 + 8 * half + 2 * quarter;
    for (int i = 0; i < BLOCK; i++) {
        const int whole = (four[i] >> (quarter < 2 ? 0 : 4) & 15) | (two[i] >> 2 * quarter & 3) << 4;
        x[i] = half_at(p + 208) * scales[i / 16] * (whole - 32);
    }
}

static void to_whole(const float *x, block *out) {
    float most = 0;
    for (int i = 0; i < BLOCK; i++) most = fmaxf(most, fabsf(x[i]));
    out->scale = most / 127, out->least = 0;
    for (int i = 0; i < BLOCK; i++) out->whole[i] = most > 0 ? (int)lrintf(x[i] / out->scale) : 0;
}

static void read_floats(int type, const uint8_t *row, int first, float *x) {
    uint16_t half;
    for (int i = 0; i < BLOCK; i++) {
        if (type == F32) memcpy(&x[i], row + 4 * (size_t)(first + i), 4);
        else memcpy(&half, row + 2 * (size_t)(first + i), 2), x[i] = type == F16 ? half_to_float(half) : from_bf16(half);
    }
}

/* Block `number` of a row. */
static void read_block(int type, const uint8_t *row, int number, block *out) {
    const uint8_t *p = row + row_bytes(type, BLOCK) * number;
    const int shares = type == Q4_K || type == Q5_K || type == Q6_K, above = type == Q4_1 || type == Q5_1;
    float x[BLOCK];
    out->least = 0;
    if (shares) {
        p = row + row_bytes(type, 8 * BLOCK) * (number / 8);
        if (type != Q6_K) return read_shared(type, p, number % 8, out);
        read_six(p, number % 8, x);
        return to_whole(x, out);
    }
    if (type == F32 || type == F16 || type == BF16) {
        read_floats(type, row, number * BLOCK, x);
        return to_whole(x, out);
    }
    out->scale = half_at(p);
    if (type == Q8_0) {
        for (int i = 0; i < BLOCK; i++) out->whole[i] = (int8_t)p[2 + i];
        return;
    }
    if (above) out->least = half_at(p + 2);
    p += above ? 4 : 2;
    split(type == Q5_0 || type == Q5_1 ? p + 4 : p, out->whole);
    if (type == Q5_0 || type == Q5_1) add_fifth(p, out->whole);
    const int middle = type == Q4_0 ? 8 : type == Q5_0 ? 16 : 0;
    for (int i = 0; i < BLOCK; i++) out->whole[i] -= middle;
}

/* The same for a matrix of bytes, in which nothing has a least value. */
static void read_as_bytes(int type, const uint8_t *row, int number, block *out) {
    read_block(type, row, number, out);
    if (out->least == 0) return;
    float x[BLOCK];
    for (int i = 0; i < BLOCK; i++) x[i] = out->least + out->scale * out->whole[i];
    to_whole(x, out);
}

static void *room(size_t size) {
    void *p = NULL;
    if (posix_memalign(&p, 64, (size + 63) / 64 * 64)) return NULL;
    memset(p, 0, size);
    return p;
}

/* Room for weights, next to one another in large pages: fewer of them to look up, and what is asked for early may cross their ends. */
static void *weights_room(arena *a, size_t size) {
    size = (size + 63) / 64 * 64;
    if (a->left < size) {
        const size_t whole = (size > ARENA ? size : ARENA) + AHEAD, page = (size_t)2 << 20;
        void *p = NULL;
        if (a->count == MOST_ARENAS || posix_memalign(&p, page, (whole + page - 1) / page * page)) return NULL;
#if defined(MADV_HUGEPAGE)
        madvise(p, (whole + page - 1) / page * page, MADV_HUGEPAGE);
#endif
        a->begin[a->count++] = p;
        a->next = p;
        a->left = whole - AHEAD;
    }
    void *found = a->next;
    a->next += size, a->left -= size;
    memset(found, 0, size);
    return found;
}

typedef struct { /* units of a matrix that one thread fills */
    const matrix *m;
    int type, from, to;
    const uint8_t *data;
} packing;

static void pack_row(const packing *p, int row) {
    const matrix *m = p->m;
    const int blocks = m->columns / BLOCK, lane = row % LANES, middle = m->kept == NIBBLES ? 8 : 0;
    const uint8_t *line = p->data + row_bytes(p->type, m->columns) * row;
    for (int b = 0; b < blocks; b++) {
        const size_t place = (size_t)(row / LANES) * blocks + b;
        uint8_t *to = m->quants + place * LANES * BLOCK / (m->kept == BYTES ? 1 : 2) + lane * 4;
        block w;
        if (m->kept == BYTES) read_as_bytes(p->type, line, b, &w);
        else read_block(p->type, line, b, &w);
        m->scales[place * LANES + lane] = to_scale(w.scale);
        if (m->least) m->least[place * LANES + lane] = to_scale(w.least);
        for (int i = 0; i < (m->kept == BYTES ? BLOCK : BLOCK / 2); i++) {
            uint8_t *at = to + i / 4 * VECTOR + i % 4;
            *at = (uint8_t)(m->kept == BYTES ? w.whole[i] + OFFSET : (w.whole[i] + middle) | (w.whole[i + BLOCK / 2] + middle) << 4);
        }
    }
}

static void *pack_units(void *of) {
    const packing *p = of;
    for (int row = p->from * LANES; row < p->to * LANES && row < p->m->rows; row++) pack_row(p, row);
    return NULL;
}

INLINE long least_of(long a, long b) { return a < b ? a : b; }

/* By several threads where it is much: a model is waited for. */
static void pack_all(const matrix *m, int type, const uint8_t *data) {
    const long parts = 1 + (long)(row_bytes(type, m->columns) * m->rows / PACKED_ALONE);
    const long cores = sysconf(_SC_NPROCESSORS_ONLN); /* -1: unknown */
    const int threads = (int)least_of(PACKERS, least_of(parts, cores < 1 ? 1 : cores));
    packing all[PACKERS];
    pthread_t others[PACKERS];
    int begun = 0;
    for (int i = threads - 1; i >= 0; i--) {
        all[i] = (packing){m, type, m->units * i / threads, m->units * (i + 1) / threads, data};
        if (i && pthread_create(&others[begun], NULL, pack_units, &all[i]) == 0) begun++;
        else pack_units(&all[i]);
    }
    for (int i = 0; i < begun; i++) pthread_join(others[i], NULL);
}

static int pack(arena *a, matrix *m, int type, const uint8_t *data, int rows, int columns) {
    const int blocks = columns / BLOCK, units = (rows + LANES - 1) / LANES, kept = how_kept(type), above = kept == NIBBLES_ABOVE;
    const size_t scales = sizeof(scale_type) * LANES * blocks * units;
    *m = (matrix){rows, columns, kept, units, NULL, NULL, NULL};
    m->quants = weights_room(a, (size_t)LANES * BLOCK / (kept == BYTES ? 1 : 2) * blocks * units);
    m->scales = weights_room(a, scales);
    if (above) m->least = weights_room(a, scales);
    if (!m->quants || !m->scales || (above && !m->least)) return 0;
    pack_all(m, type, data);
    return 1;
}

/* One unit of a matrix times `count` rows of tokens from `first` on. */
INLINE void product_of(const matrix *m, int unit, const bytes *a, int first, const int count, const int kept, vf *out) {
    const int blocks = m->columns / BLOCK, middle = kept == BYTES ? OFFSET : kept == NIBBLES ? 8 : 0;
    const uint8_t *w = m->quants + (size_t)unit * blocks * LANES * BLOCK / (kept == BYTES ? 1 : 2);
    const scale_type *scales = m->scales + (size_t)unit * blocks * LANES;
    const scale_type *least = kept == NIBBLES_ABOVE ? m->least + (size_t)unit * blocks * LANES : NULL;
    const int8_t *q = a->quants + (size_t)first * a->columns;
    const float *s = a->scales + (size_t)first * blocks;
    const int32_t *sums = a->sums + (size_t)first * blocks;
    vf total[8];
    for (int i = 0; i < count; i++) total[i] = all(0);
    for (int b = 0; b < blocks; b++) {
        vi part[8];
        for (int i = 0; i < count; i++) part[i] = -middle * sums[i * blocks + b] - (vi){0};
        if (kept != BYTES) {
            for (int j = 0; j < 4; j++, w += VECTOR) {
                const vb both = *(const vb *)w;
                __builtin_prefetch(w + AHEAD);
                const vb low = both & 15, high = (vb)((vw)both >> 4) & 15;
                for (int i = 0; i < count; i++) {
                    int32_t four[2];
                    memcpy(&four[0], q + (size_t)i * a->columns + b * BLOCK + 4 * j, 4);
                    memcpy(&four[1], q + (size_t)i * a->columns + b * BLOCK + 4 * j + 16, 4);
                    part[i] = dot_nibbles(dot_nibbles(part[i], low, four[0]), high, four[1]);
                }
            }
        } else {
            for (int j = 0; j < 8; j++, w += VECTOR) {
                const vb four_columns = *(const vb *)w;
                __builtin_prefetch(w + AHEAD);
                for (int i = 0; i < count; i++) {
                    int32_t four;
                    memcpy(&four, q + (size_t)i * a->columns + b * BLOCK + 4 * j, 4);
                    part[i] = dot_bytes(part[i], four_columns, four);
                }
            }
        }
        const vf scale = load_scales(scales + (size_t)b * LANES);
        for (int i = 0; i < count; i++) total[i] = fused(__builtin_convertvector(part[i], vf), scale * s[i * blocks + b], total[i]);
        if (kept == NIBBLES_ABOVE) {
            const vf lowest = load_scales(least + (size_t)b * LANES);
            for (int i = 0; i < count; i++) total[i] = fused(lowest, all(s[i * blocks + b] * sums[i * blocks + b]), total[i]);
        }
    }
    for (int i = 0; i < count; i++) out[i] = total[i];
}

#define CASE(n, kept) case n: product_of(m, unit, a, first, n, kept, out); break;
#define PRODUCT(name, kept)                                                                                                        \
    static __attribute__((noinline)) void name(const matrix *m, int unit, const bytes *a, int first, int count, vf *out) {         \
        switch (count) {                                                                                                           \
            CASE(1, kept) CASE(2, kept) CASE(3, kept) CASE(4, kept) CASE(5, kept) CASE(6, kept) CASE(7, kept) CASE(8, kept)        \
        }                                                                                                                          \
    }
PRODUCT(product_of_bytes, BYTES)
PRODUCT(product_of_nibbles, NIBBLES)
PRODUCT(product_of_nibbles_above, NIBBLES_ABOVE)

/* Functions of their own: as one, the largest of them made the others slower. */
static void product(const matrix *m, int unit, const bytes *a, int first, int count, vf *out) {
    (m->kept == BYTES ? product_of_bytes : m->kept == NIBBLES ? product_of_nibbles : product_of_nibbles_above)(m, unit, a, first, count, out);
}

/* The model */

typedef struct {
    matrix to_queries, to_keys, to_values, out, gate, up, down;
    float *attention_norm, *feed_norm;
    float *bias;                   /* of queries, keys and values, one after the other; NULL: none */
    float *query_norm, *key_norm;  /* of each head; NULL: none */
    uint16_t *keys, *values;  /* the trunk: (heads, positions / LANES, head, LANES), (heads, positions, head) */
    float *tree_keys, *tree_values; /* (heads, nodes, head) */
} layer;

typedef struct { /* how tokens are chosen */
    float temperature, top_p, min_p;
    int32_t top_k; /* 0: no limit */
    uint64_t seed;
} sampling;

/* What is wanted of the outputs of a step, FEW at most, beside their logits: of each the `k` tokens that will most likely be chosen
   after it, best first, and how likely; those below its floor are left out, but for the first. */
typedef struct {
    sampling how;
    int32_t k;
    const int32_t *names; /* ids of the vocabulary outside; NULL: the same */
    const float *floors;  /* (outputs) */
    int32_t *ids;         /* (outputs, k) */
    float *shares;        /* the same */
    int32_t *counts;      /* (outputs) */
} guesses;

typedef struct { /* one step's work */
    int rows, outputs, begin, stretches;
    const int32_t *tokens, *positions, *places, *ends, *starts, *ancestors;
    float *logits;
    const guesses *wanted; /* NULL: none */
} work;

typedef struct { /* what one thread found in its part of a row of logits */
    float most;
    int count;
    int32_t ids[NOTED];
    float logits[NOTED];
} notes;

typedef struct duo_model {
    int width, heads, kv_heads, head, feed, layers, vocabulary, context, nodes, exact, threads;
    float epsilon;
    arena arena;
    layer *layer;
    matrix head_matrix;
    float *last_norm;
    const uint8_t *embeddings;
    int embeddings_type;
    float *cosines, *sines; /* (positions, head / 2) */
    float *x, *queries, *attended, *parts;
    bytes shared, hidden, own[MOST_THREADS];
    notes *notes[MOST_THREADS]; /* of FEW rows */
    size_t parts_room;
    work work;
    const volatile char *flag;
    int stopped;
    pthread_t thread[MOST_THREADS];
    _Atomic unsigned generation;
    _Atomic int sleepers, leaving;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int spin_microseconds;
    struct { _Alignas(64) _Atomic unsigned flag[8]; unsigned meetings; } seat[MOST_THREADS];
} duo_model;

typedef struct { duo_model *model; int number; } worker;

INLINE void rest(int *spins) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
    if (++*spins >= SPINS) sched_yield();
}

/* Everybody waits for everybody: in round r each tells the one 2^r seats further on. */
static void meet(duo_model *m, int me) {
    unsigned now = ++m->seat[me].meetings;
    for (int round = 0, step = 1; step < m->threads; round++, step *= 2) {
        int spins = 0;
        atomic_store_explicit(&m->seat[(me + step) % m->threads].flag[round], now, memory_order_release);
        while ((int)(atomic_load_explicit(&m->seat[me].flag[round], memory_order_acquire) - now) < 0) rest(&spins);
    }
}

INLINE void share(const duo_model *m, int me, int count, int *from, int *to) {
    *from = (int)((int64_t)count * me / m->threads);
    *to = (int)((int64_t)count * (me + 1) / m->threads);
}

/* 32 numbers as bytes. */
INLINE void to_bytes(const float *x, int8_t *q, float *scale, int32_t *total) {
    vf size = all(0);
    for (int i = 0; i < BLOCK; i += LANES) size = larger(size, larger(load(x + i), -load(x + i)));
    float most = largest(size), inverse = most > 0 ? 127 / most : 0;
    int32_t added = 0;
    for (int i = 0; i < BLOCK; i++) {
        float t = x[i] * inverse;
        int8_t byte = (int8_t)(int)(t + (t < 0 ? -0.5f : 0.5f));
        q[i] = byte;
        added += byte;
    }
    *scale = most / 127;
    *total = added;
}

static void row_to_bytes(const float *x, const float *norm, float epsilon, const bytes *to, int row) {
    int columns = to->columns, blocks = columns / BLOCK;
    float scale = 1;
    if (norm) {
        vf squares = all(0);
        for (int i = 0; i < columns; i += LANES) squares += load(x + i) * load(x + i);
        scale = 1 / sqrtf(sum(squares) / columns + epsilon);
    }
    for (int b = 0; b < blocks; b++) {
        float part[BLOCK];
        for (int i = 0; i < BLOCK; i++) part[i] = norm ? x[b * BLOCK + i] * scale * norm[b * BLOCK + i] : x[b * BLOCK + i];
        to_bytes(part, to->quants + (size_t)row * columns + b * BLOCK, to->scales + (size_t)row * blocks + b,
                 to->sums + (size_t)row * blocks + b);
    }
}

/* Rows `from` to `to` of `x`, normed (`norm` may be none) and as bytes: by everybody for himself, or by all together. */
static bytes prepare(duo_model *m, int me, const float *x, int columns, const float *norm, int from, int to) {
    const int together = to - from > FEW;
    bytes a = together ? m->shared : m->own[me];
    int low = 0, high = to - from;
    a.columns = columns;
    if (together) share(m, me, to - from, &low, &high);
    for (int i = low; i < high; i++) row_to_bytes(x + (size_t)(from + i) * columns, norm, m->epsilon, &a, i);
    if (together) meet(m, me);
    return a;
}

static void embed(duo_model *m, int me) {
    int from, to;
    block w;
    share(m, me, m->work.rows, &from, &to);
    size_t line = row_bytes(m->embeddings_type, m->width);
    for (int row = from; row < to; row++) {
        const uint8_t *source = m->embeddings + line * (size_t)m->work.tokens[row];
        for (int b = 0; b < m->width / BLOCK; b++) {
            read_block(m->embeddings_type, source, b, &w);
            for (int i = 0; i < BLOCK; i++) m->x[(size_t)row * m->width + b * BLOCK + i] = w.least + w.scale * w.whole[i];
        }
    }
}

/* LANES numbers of a row's queries, keys and values, to where they belong. */
INLINE void put(duo_model *m, layer *l, int row, int at, vf v) {
    const int queries = m->heads * m->head, kv = m->kv_heads * m->head, position = m->work.positions[row];
    if (at < queries + kv) { /* neighbours turn together */
        const int inside = (at < queries ? at : at - queries) % m->head / 2;
        const float *c = m->cosines + (size_t)position * m->head / 2 + inside, *s = m->sines + (size_t)position * m->head / 2 + inside;
        vf turned;
        for (int i = 0; i < LANES; i += 2) {
            turned[i] = v[i] * c[i / 2] - v[i + 1] * s[i / 2];
            turned[i + 1] = v[i] * s[i / 2] + v[i + 1] * c[i / 2];
        }
        v = turned;
    }
    if (at < queries) {
        store(m->queries + (size_t)row * queries + at, v / sqrtf((float)m->head));
        return;
    }
    const int is_key = at < queries + kv, from = at - queries - (is_key ? 0 : kv), h = from / m->head, d = from % m->head;
    const int place = m->work.places[row];
    if (place >= m->context) {
        float *tree = is_key ? l->tree_keys : l->tree_values;
        for (int i = 0; i < LANES && m->exact; i++) v[i] = from_bf16(to_bf16(v[i]));
        store(tree + ((size_t)h * m->nodes + place - m->context) * m->head + d, v);
    } else if (is_key) {
        uint16_t *to = l->keys + ((size_t)h * m->context + place / LANES * LANES) * m->head + (size_t)d * LANES + place % LANES;
        for (int i = 0; i < LANES; i++) to[i * LANES] = to_bf16(v[i]);
    } else {
        uint16_t *to = l->values + ((size_t)h * m->context + place) * m->head + d;
        for (int i = 0; i < LANES; i++) to[i] = to_bf16(v[i]);
    }
}

/* A head's numbers over the root of their mean square. */
static void norm_head(const duo_model *m, const float *norm, vf *const *parts, int row, int count) {
    vf squares = all(0);
    for (int j = 0; j < count; j++) squares += parts[j][row] * parts[j][row];
    const float scale = 1 / sqrtf(sum(squares) / m->head + m->epsilon);
    for (int j = 0; j < count; j++) parts[j][row] *= scale * load(norm + j * LANES);
}

/* Queries, keys and values: unit by unit, or, where heads have norms, head by head. */
static void project(duo_model *m, layer *l, int me) {
    const bytes a = prepare(m, me, m->x, m->width, l->attention_norm, 0, m->work.rows);
    const int together = l->query_norm ? m->head / LANES : 1, queries = l->to_queries.units, keys = queries + l->to_keys.units;
    vf out[WIDEST_HEAD / LANES][8], *parts[WIDEST_HEAD / LANES];
    int from, to;
    for (int j = 0; j < together; j++) parts[j] = out[j];
    share(m, me, (keys + l->to_values.units) / together, &from, &to);
    for (int unit = from * together; unit < to * together; unit += together) {
        const matrix *w = unit < queries ? &l->to_queries : unit < keys ? &l->to_keys : &l->to_values;
        const int first = unit < queries ? 0 : unit < keys ? queries : keys;
        for (int row = 0; row < m->work.rows; row += 8) {
            const int count = m->work.rows - row < 8 ? m->work.rows - row : 8;
            for (int j = 0; j < together; j++) product(w, unit + j - first, &a, row, count, out[j]);
            for (int i = 0; i < count; i++) {
                for (int j = 0; l->bias && j < together; j++) out[j][i] += load(l->bias + (unit + j) * LANES);
                if (l->query_norm && unit < keys) norm_head(m, unit < queries ? l->query_norm : l->key_norm, parts, i, together);
                for (int j = 0; j < together; j++) put(m, l, row + i, (unit + j) * LANES, out[j][i]);
            }
        }
    }
}

/* Of so many queries that are left, those that are taken at once. */
INLINE int at_once(int left) { return left >= TOGETHER ? TOGETHER : left >= 3 ? 3 : 1; }

/* Scores of `queries` queries for the keys of a block. */
INLINE void score_block(const float *const *query, const uint16_t *block, const int head, const int queries, vf *scores) {
    for (int i = 0; i < queries; i++) scores[i] = all(0);
    for (int d = 0; d < head; d++) {
        const vf k = load_bf16(block + d * LANES);
        for (int i = 0; i < queries; i++) scores[i] = fused(all(query[i][d]), k, scores[i]);
    }
}

/* Adds `count` values (of `vectors` vectors each) to the results of `queries` queries, each with its own weights. */
INLINE void weigh(float (*weights)[STRETCH], const uint16_t *values, int head, int count, const int queries, const int vectors,
                  const float *fade, float *const *results, int at) {
    vf total[TOGETHER][4];
    for (int i = 0; i < queries; i++)
        for (int v = 0; v < vectors; v++) total[i][v] = load(results[i] + at + v * LANES) * fade[i];
    for (int p = 0; p < count; p++, values += head)
        for (int v = 0; v < vectors; v++) {
            const vf value = load_bf16(values + v * LANES);
            for (int i = 0; i < queries; i++) total[i][v] = fused(all(weights[i][p]), value, total[i][v]);
        }
    for (int i = 0; i < queries; i++)
        for (int v = 0; v < vectors; v++) store(results[i] + at + v * LANES, total[i][v]);
}

INLINE void weigh_all(float (*weights)[STRETCH], const uint16_t *values, const int head, int count, const int queries, const float *fade,
                      float *const *results) {
    int d = 0;
    for (; d + WIDE * LANES <= head; d += WIDE * LANES) weigh(weights, values + d, head, count, queries, WIDE, fade, results, 2 + d);
    for (; d < head; d += LANES) weigh(weights, values + d, head, count, queries, 1, fade, results, 2 + d);
}

typedef struct { /* queries that look at the same keys */
    int count, end[SHARED * 8]; /* the position behind the last that each may see */
    const float *query[SHARED * 8];
    float *result[SHARED * 8]; /* maximum, sum, weighted values */
} lookers;

/* How far a row sees the trunk: exactly, where it is in the tree, only those stretches that are full. */
INLINE int trunk_end(const duo_model *m, int row) {
    const int end = m->work.ends[row];
    return m->exact && m->work.starts[row + 1] > m->work.starts[row] ? end / STRETCH * STRETCH : end;
}

/* All heads of `rows` rows that have the key head `kv`. */
INLINE void look(const duo_model *m, lookers *all, int kv, int first, int rows, int part, const int head) {
    const int group = m->heads / m->kv_heads;
    all->count = rows * group;
    for (int i = 0; i < all->count; i++) {
        const int row = first + i / group, h = kv * group + i % group;
        all->query[i] = m->queries + ((size_t)row * m->heads + h) * head;
        all->result[i] = m->parts + (((size_t)row * m->heads + h) * m->work.stretches + part) * (2 + head);
        all->result[i][0] = HARDLY;
        for (int d = 1; d < 2 + head; d++) all->result[i][d] = 0;
        all->end[i] = trunk_end(m, row);
    }
}

/* The queries over positions `start` to `stop`, STRETCH at most, whose keys and values begin at `keys` and `values`. */
INLINE void attend_stretch(const duo_model *m, const lookers *all_of, const uint16_t *keys, const uint16_t *values, int start, int stop,
                           int is_first, const int head) {
    const int count = all_of->count, blocks = (stop - start + LANES - 1) / LANES;
    _Alignas(64) float score[SHARED * 8][STRETCH];
    float fade[SHARED * 8];
    for (int b = 0; b < blocks; b++) {
        const uint16_t *block = keys + (size_t)b * LANES * head;
        vi place;
        for (int i = 0; i < LANES; i++) place[i] = start + b * LANES + i;
        for (int i = 0, some; i < count; i += some) {
            vf s[TOGETHER];
            some = at_once(count - i);
            if (some == TOGETHER) score_block(all_of->query + i, block, head, TOGETHER, s);
            else if (some == 3) score_block(all_of->query + i, block, head, 3, s);
            else score_block(all_of->query + i, block, head, 1, s);
            for (int j = 0; j < some; j++) {
                const vi seen = (place >= m->work.begin) & (place < all_of->end[i + j]);
                *(vf *)(score[i + j] + b * LANES) = pick(seen, s[j], all(NEVER));
            }
        }
    }
    for (int i = 0; i < count; i++) {
        float *result = all_of->result[i];
        vf most = *(vf *)score[i], total = all(0);
        for (int b = 1; b < blocks; b++) most = larger(most, *(vf *)(score[i] + b * LANES));
        const float before = result[0], now = fmaxf(before, largest(most));
        fade[i] = is_first ? 0 : expf(before - now);
        for (int b = 0; b < blocks; b++) {
            vf weight = exponential(*(vf *)(score[i] + b * LANES) - now);
            *(vf *)(score[i] + b * LANES) = weight;
            total += weight;
        }
        result[0] = now;
        result[1] = result[1] * fade[i] + sum(total);
    }
    for (int i = 0, some; i < count; i += some) {
        some = at_once(count - i);
        if (some == TOGETHER) weigh_all(score + i, values, head, stop - start, TOGETHER, fade + i, all_of->result + i);
        else if (some == 3) weigh_all(score + i, values, head, stop - start, 3, fade + i, all_of->result + i);
        else weigh_all(score + i, values, head, stop - start, 1, fade + i, all_of->result + i);
    }
}

/* Queries of `rows` rows and one key head over the trunk's positions `low` to `high`: a part. */
INLINE void attend_with(duo_model *m, layer *l, int kv, int first, int rows, int low, int high, int part, const int head) {
    const uint16_t *keys = l->keys + (size_t)kv * m->context * head, *values = l->values + (size_t)kv * m->context * head;
    lookers all;
    look(m, &all, kv, first, rows, part, head);
    for (int start = low; start < high; start += STRETCH) {
        const int stop = high < start + STRETCH ? high : start + STRETCH;
        attend_stretch(m, &all, keys + (size_t)start * head, values + (size_t)start * head, start, stop, start == low, head);
    }
}

static void attend(duo_model *m, layer *l, int kv, int first, int rows, int low, int high, int part) {
    if (m->head == 64) attend_with(m, l, kv, first, rows, low, high, part, 64);
    else if (m->head == 128) attend_with(m, l, kv, first, rows, low, high, part, 128);
    else attend_with(m, l, kv, first, rows, low, high, part, m->head);
}

/* Exactly: a stretch of a row in the tree that the trunk does not fill, with the tree's keys and values where they belong. The rows of
   a step end their trunk at one place, so what is copied of it for the first of them is there for the others. */
INLINE void attend_end_with(duo_model *m, layer *l, int kv, int first, int rows, int start, int part, const int head) {
    _Alignas(64) uint16_t keys[STRETCH * WIDEST_HEAD], values[STRETCH * WIDEST_HEAD];
    const size_t trunk = ((size_t)kv * m->context + start) * head;
    int copied = -1;
    for (int row = first; row < first + rows; row++) {
        const int end = m->work.ends[row], from = m->work.starts[row], count = m->work.starts[row + 1] - from;
        if (!count || start < end / STRETCH * STRETCH) continue;
        const int left = end + count - start, stop = start + (left < STRETCH ? left : STRETCH);
        const int whole = end <= start ? 0 : (end - start + LANES - 1) / LANES * LANES * head;
        if (copied != end) {
            memcpy(keys, l->keys + trunk, sizeof(uint16_t) * whole);
            memcpy(values, l->values + trunk, sizeof(uint16_t) * whole);
            copied = end;
        }
        for (int position = end > start ? end : start; position < stop; position++) {
            const size_t node = ((size_t)kv * m->nodes + m->work.ancestors[from + position - end]) * head;
            const int at = position - start;
            uint16_t *key = keys + (size_t)at / LANES * LANES * head + at % LANES, *value = values + (size_t)at * head;
            for (int d = 0; d < head; d++) key[d * LANES] = to_bf16(l->tree_keys[node + d]), value[d] = to_bf16(l->tree_values[node + d]);
        }
        lookers all;
        look(m, &all, kv, row, 1, part, head);
        for (int i = 0; i < all.count; i++) all.end[i] = end + count;
        if (stop > start) attend_stretch(m, &all, keys, values, start, stop, 1, head);
    }
}

static void attend_end(duo_model *m, layer *l, int kv, int first, int rows, int start, int part) {
    if (m->head == 64) attend_end_with(m, l, kv, first, rows, start, part, 64);
    else if (m->head == 128) attend_end_with(m, l, kv, first, rows, start, part, 128);
    else attend_end_with(m, l, kv, first, rows, start, part, m->head);
}

/* The trunk: few rows in stretches of it, many rows as a whole. */
static void attend_trunk(duo_model *m, layer *l, int me, int first) {
    const int rows = m->work.rows - first, groups = (rows + SHARED - 1) / SHARED, low = m->work.begin / LANES * LANES;
    const int looks = m->kv_heads * m->work.stretches, many = looks >= EVENLY * m->threads;
    int from, to;
    share(m, me, groups * looks, &from, &to);
    for (int task = from; task < to; task++) {
        /* Many stretches: those who look at one come one after the other, while it is in a cache. Few: the last, which is short, and
           full ones take turns, so that nobody gets all of the long work. */
        const int group = many ? task % groups : task / looks, look = many ? task / groups : task % looks;
        int part = look % m->work.stretches, kv = look / m->work.stretches;
        int row = first + group * SHARED, count = m->work.rows - row < SHARED ? m->work.rows - row : SHARED;
        int start = low + part * STRETCH, stop = 0;
        for (int i = 0; i < count; i++) stop = trunk_end(m, row + i) > stop ? trunk_end(m, row + i) : stop;
        if (m->work.stretches > 1 && stop > start + STRETCH) stop = start + STRETCH;
        attend(m, l, kv, row, count, start, stop, part);
        if (m->exact) attend_end(m, l, kv, row, count, start, part);
    }
}

/* The parts of a row and head together, and what lies in the tree: the row itself and its ancestors. */
static void combine(duo_model *m, layer *l, int row, int h) {
    const int head = m->head, kv = h / (m->heads / m->kv_heads), stretches = m->work.stretches;
    const float *q = m->queries + ((size_t)row * m->heads + h) * head;
    const float *parts = m->parts + ((size_t)row * m->heads + h) * stretches * (2 + head);
    float *to = m->attended + ((size_t)row * m->heads + h) * head;
    const int from = m->work.starts[row], count = m->exact ? 0 : m->work.starts[row + 1] - from; /* exactly: they are in the parts */
    const int32_t *nodes = m->work.ancestors + from;
    float score[MOST_ANCESTORS], most = HARDLY, total = 0;
    for (int i = 0; i < count; i++) {
        const float *k = l->tree_keys + ((size_t)kv * m->nodes + nodes[i]) * head;
        vf s = all(0);
        for (int d = 0; d < head; d += LANES) s += load(q + d) * load(k + d);
        score[i] = sum(s);
        most = fmaxf(most, score[i]);
    }
    for (int p = 0; p < stretches; p++) most = fmaxf(most, parts[(size_t)p * (2 + head)]);
    vf t[WIDEST_HEAD / LANES];
    for (int v = 0; v < head / LANES; v++) t[v] = all(0);
    for (int p = 0; p < stretches; p++) {
        const float *part = parts + (size_t)p * (2 + head), weight = expf(part[0] - most);
        total += weight * part[1];
        for (int v = 0; v < head / LANES; v++) t[v] += weight * load(part + 2 + v * LANES);
    }
    for (int i = 0; i < count; i++) {
        const float *value = l->tree_values + ((size_t)kv * m->nodes + nodes[i]) * head, weight = expf(score[i] - most);
        total += weight;
        for (int v = 0; v < head / LANES; v++) t[v] += weight * load(value + v * LANES);
    }
    for (int v = 0; v < head / LANES; v++) store(to + v * LANES, t[v] / total);
}

/* x += matrix * a, for rows from `first` on. */
static void add_product(duo_model *m, const matrix *w, const bytes *a, int me, int first) {
    int from, to;
    share(m, me, w->units, &from, &to);
    for (int unit = from; unit < to; unit++)
        for (int row = first; row < m->work.rows; row += 8) {
            vf out[8];
            int count = m->work.rows - row < 8 ? m->work.rows - row : 8;
            product(w, unit, a, row - first, count, out);
            for (int i = 0; i < count; i++) {
                float *x = m->x + (size_t)(row + i) * m->width + unit * LANES;
                store(x, load(x) + out[i]);
            }
        }
}

static void feed(duo_model *m, layer *l, int me, int first) {
    const bytes a = prepare(m, me, m->x, m->width, l->feed_norm, first, m->work.rows);
    const int blocks = m->feed / BLOCK;
    int from, to;
    share(m, me, blocks, &from, &to);
    for (int block = from; block < to; block++)
        for (int row = first; row < m->work.rows; row += 8) {
            vf gate[BLOCK / LANES][8], up[BLOCK / LANES][8];
            int count = m->work.rows - row < 8 ? m->work.rows - row : 8;
            for (int j = 0; j < BLOCK / LANES; j++) {
                product(&l->gate, block * (BLOCK / LANES) + j, &a, row - first, count, gate[j]);
                product(&l->up, block * (BLOCK / LANES) + j, &a, row - first, count, up[j]);
            }
            for (int i = 0; i < count; i++) {
                _Alignas(64) float h[BLOCK];
                for (int j = 0; j < BLOCK / LANES; j++) *(vf *)(h + j * LANES) = gate[j][i] / (1 + exponential(-gate[j][i])) * up[j][i];
                size_t at = (size_t)(row - first + i) * blocks + block;
                to_bytes(h, m->hidden.quants + at * BLOCK, m->hidden.scales + at, m->hidden.sums + at);
            }
        }
}

/* The logits of the outputs, and for few of them each thread's largest. */
static void say(duo_model *m, int me) {
    const int first = m->work.rows - m->work.outputs, noting = m->work.outputs <= FEW;
    const bytes a = prepare(m, me, m->x, m->width, m->last_norm, first, m->work.rows);
    vf most[FEW];
    int from, to;
    for (int i = 0; i < FEW; i++) most[i] = all(NEVER);
    share(m, me, m->head_matrix.units, &from, &to);
    for (int unit = from; unit < to; unit++)
        for (int row = 0; row < m->work.outputs; row += 8) {
            vf out[8];
            int count = m->work.outputs - row < 8 ? m->work.outputs - row : 8, left = m->vocabulary - unit * LANES;
            product(&m->head_matrix, unit, &a, row, count, out);
            for (int i = 0; i < count; i++) {
                float *at = m->work.logits + (size_t)(row + i) * m->vocabulary + unit * LANES;
                if (left >= LANES) store(at, out[i]);
                else memcpy(at, &out[i], sizeof(float) * left);
                if (noting && left >= LANES) most[row + i] = larger(most[row + i], out[i]);
            }
        }
    for (int row = 0; row < m->work.outputs && noting; row++) m->notes[me][row].most = largest(most[row]);
}

/* Forget the less likely of what was noted, so that there is room again. Returns the new bound. */
static float thin_out(notes *found, float bound) {
    while (found->count == NOTED) {
        int kept = 0;
        bound += 1;
        for (int i = 0; i < found->count; i++)
            if (found->logits[i] > bound) found->ids[kept] = found->ids[i], found->logits[kept++] = found->logits[i];
        found->count = kept;
    }
    return bound;
}

/* Each thread's likely tokens, by id. */
static void note(duo_model *m, int me) {
    int from, to;
    share(m, me, m->head_matrix.units, &from, &to);
    for (int row = 0; row < m->work.outputs; row++) {
        notes *found = &m->notes[me][row];
        const float *logits = m->work.logits + (size_t)row * m->vocabulary;
        float bound = NEVER;
        for (int i = 0; i < m->threads; i++) bound = fmaxf(bound, m->notes[i][row].most);
        bound -= LIKELY;
        found->count = 0;
        for (int unit = from; unit < to; unit++) {
            const int left = m->vocabulary - unit * LANES;
            if (left >= LANES && largest(load(logits + unit * LANES)) <= bound) continue;
            for (int id = unit * LANES; id < unit * LANES + (left < LANES ? left : LANES); id++)
                if (logits[id] > bound) {
                    bound = thin_out(found, bound);
                    found->ids[found->count] = id, found->logits[found->count++] = logits[id];
                }
        }
    }
}

typedef struct {
    int32_t id;
    float score;
} candidate;

static int better(const void *a, const void *b) {
    const candidate *x = a, *y = b;
    return x->score != y->score ? (x->score < y->score ? 1 : -1) : (x->id > y->id) - (x->id < y->id);
}

static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return x ^ x >> 31;
}

/* The noise of a token at a position: the same numbers as in sampling.py. */
static float gumbel(uint64_t key, uint64_t token) {
    const uint64_t golden = 0x9E3779B97F4A7C15ull;
    const double u = ((double)(mix(mix(key) + token * golden) >> 12) + 0.5) * 0x1p-52;
    return (float)-log(-log(u));
}

/* The best of what the threads noted of a row, best first. Scores: logits below the largest. Also the sum of e^(score / scale). */
static int collect(const duo_model *m, int row, int most, float scale, candidate *best, float *total) {
    float top = NEVER;
    int count = 0;
    *total = 0;
    for (int t = 0; t < m->threads; t++) top = fmaxf(top, m->notes[t][row].most);
    for (int t = 0; t < m->threads; t++) {
        const notes *found = &m->notes[t][row];
        for (int i = 0; i < found->count; i++) {
            const float score = found->logits[i] - top;
            *total += expf(score / scale);
            if (count == most && score <= best[most - 1].score) continue;
            int at = count < most ? count++ : most - 1;
            for (; at > 0 && best[at - 1].score < score; at--) best[at] = best[at - 1];
            best[at] = (candidate){found->ids[i], score};
        }
    }
    return count;
}

/* With the noise of a position: who is likely to be drawn there, best first. Scores become shares. */
static int perturb(const sampling *s, const int32_t *names, int position, candidate *best, int count, float total) {
    const float scale = s->temperature;
    float head = 0, allowed = 0, before = 0;
    int kept = 0;
    if (s->top_k && count > s->top_k) count = s->top_k;
    for (int i = 0; i < count; i++) best[i].score /= scale, allowed += expf(best[i].score);
    for (int i = 0; i < count; i++) {
        const float weight = expf(best[i].score), share = weight / allowed;
        head += weight;
        if (i == 0 || ((s->top_p >= 1 || before < s->top_p) && weight >= s->min_p)) best[kept++] = best[i];
        before += share;
    }
    const float rest = s->top_k || s->top_p < 1 || s->min_p > 0 ? 0 : fmaxf(total - head, 0);
    for (int i = 0; i < kept; i++)
        best[i].score += gumbel(s->seed * 0x9E3779B97F4A7C15ull + (uint64_t)position, names ? names[best[i].id] : best[i].id);
    qsort(best, kept, sizeof(candidate), better);
    const float top = fmaxf(best[0].score, 0);
    float sum = rest * expf(-top);
    for (int i = 0; i < kept; i++) best[i].score = expf(best[i].score - top), sum += best[i].score;
    for (int i = 0; i < kept; i++) best[i].score /= sum;
    return kept;
}

/* The guesses behind one output. */
static void guess(const duo_model *m, int row) {
    const guesses *g = m->work.wanted;
    const int greedy = g->how.temperature <= 0, position = m->work.positions[m->work.rows - m->work.outputs + row] + 1;
    int32_t *ids = g->ids + (size_t)row * g->k, found = 0;
    float *shares = g->shares + (size_t)row * g->k, total;
    candidate best[CONTENDERS];
    int count = collect(m, row, greedy && g->k < CONTENDERS ? g->k : CONTENDERS, greedy ? 1 : g->how.temperature, best, &total);
    if (!greedy && count) count = perturb(&g->how, g->names, position, best, count, total);
    for (; found < count && found < g->k; found++) {
        const float share = greedy ? expf(best[found].score) / total : best[found].score;
        if (found && share < g->floors[row]) break;
        ids[found] = g->names ? g->names[best[found].id] : best[found].id;
        shares[found] = share;
    }
    g->counts[row] = found;
}

static void run(duo_model *m, int me) {
    const work *w = &m->work;
    embed(m, me);
    meet(m, me);
    for (int i = 0; i < m->layers; i++) {
        layer *l = &m->layer[i];
        const int first = i == m->layers - 1 ? w->rows - w->outputs : 0; /* of the last layer only the outputs matter, and its keys */
        if (me == 0) m->stopped |= m->flag && *m->flag;
        project(m, l, me);
        meet(m, me);
        if (m->stopped || first == w->rows) return;
        attend_trunk(m, l, me, first);
        meet(m, me);
        int from, to;
        share(m, me, (w->rows - first) * m->heads, &from, &to);
        for (int j = from; j < to; j++) combine(m, l, first + j / m->heads, j % m->heads);
        meet(m, me);
        const bytes a = prepare(m, me, m->attended, m->heads * m->head, NULL, first, w->rows);
        add_product(m, &l->out, &a, me, first);
        meet(m, me);
        feed(m, l, me, first);
        meet(m, me);
        add_product(m, &l->down, &m->hidden, me, first);
        meet(m, me);
    }
    say(m, me);
    if (w->outputs > FEW || m->exact) return;
    meet(m, me);
    note(m, me);
    if (!w->wanted || w->outputs == 1) return; /* of one they are found sooner than threads meet */
    meet(m, me);
    for (int row = me; row < w->outputs; row += m->threads) guess(m, row);
}

/* Threads */

static double microseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e6 * t.tv_sec + 1e-3 * t.tv_nsec;
}

static void wait_for_work(duo_model *m, unsigned done) {
    int spins = 0;
    double began = microseconds();
    while (atomic_load_explicit(&m->generation, memory_order_acquire) == done) {
        rest(&spins);
        if (spins % 64 || microseconds() - began < m->spin_microseconds) continue;
        pthread_mutex_lock(&m->lock);
        atomic_fetch_add(&m->sleepers, 1);
        while (atomic_load(&m->generation) == done) pthread_cond_wait(&m->wake, &m->lock);
        atomic_fetch_sub(&m->sleepers, 1);
        pthread_mutex_unlock(&m->lock);
    }
}

static void *serve(void *argument) {
    worker self = *(worker *)argument;
    free(argument);
    for (unsigned done = 0;; done++) {
        wait_for_work(self.model, done);
        if (atomic_load(&self.model->leaving)) return NULL;
        run(self.model, self.number);
        meet(self.model, self.number);
    }
}

static void begin_work(duo_model *m) {
    atomic_fetch_add(&m->generation, 1);
    if (atomic_load(&m->sleepers)) {
        pthread_mutex_lock(&m->lock);
        pthread_cond_broadcast(&m->wake);
        pthread_mutex_unlock(&m->lock);
    }
}

/* What Python calls */

/* Has it been built for a processor whose vectors of bytes it knows how to multiply? Elsewhere a general engine is faster. */
int duo_is_fast(void) { return LANES > 4; }

static int make_bytes(bytes *b, int rows, int columns) {
    *b = (bytes){columns, room((size_t)rows * columns), room(sizeof(float) * rows * (columns / BLOCK)), room(4 * (size_t)rows * (columns / BLOCK))};
    return b->quants && b->scales && b->sums;
}

static void free_bytes(bytes *b) { free(b->quants), free(b->scales), free(b->sums); }

void duo_free(duo_model *m) {
    if (!m) return;
    atomic_store(&m->leaving, 1);
    begin_work(m);
    for (int i = 1; i < m->threads; i++) pthread_join(m->thread[i], NULL);
    for (int i = 0; i < m->layers && m->layer; i++) {
        layer *l = &m->layer[i];
        free(l->attention_norm), free(l->feed_norm), free(l->bias), free(l->query_norm), free(l->key_norm);
        free(l->keys), free(l->values), free(l->tree_keys), free(l->tree_values);
    }
    for (int i = 0; i < m->arena.count; i++) free(m->arena.begin[i]);
    free(m->layer), free(m->last_norm);
    free(m->cosines), free(m->sines), free(m->x), free(m->queries), free(m->attended), free(m->parts);
    free_bytes(&m->shared), free_bytes(&m->hidden);
    for (int i = 0; i < MOST_THREADS; i++) free_bytes(&m->own[i]), free(m->notes[i]);
    pthread_mutex_destroy(&m->lock), pthread_cond_destroy(&m->wake);
    free(m);
}

/* `shape`: width, heads, kv_heads, head, feed, layers, vocabulary, context (a multiple of LANES), nodes of a tree, exact.
   `frequencies`: of the positions' rotation, (head / 2). NULL: no memory. */
duo_model *duo_new(const int32_t *shape, float epsilon, const float *frequencies) {
    duo_model *m = room(sizeof(duo_model));
    if (!m) return NULL;
    m->width = shape[0], m->heads = shape[1], m->kv_heads = shape[2], m->head = shape[3], m->feed = shape[4];
    m->layers = shape[5], m->vocabulary = shape[6], m->context = shape[7], m->nodes = shape[8], m->exact = shape[9];
    m->epsilon = epsilon, m->threads = 1;
    pthread_mutex_init(&m->lock, NULL), pthread_cond_init(&m->wake, NULL);
    const size_t rows = MOST_ROWS, attention = (size_t)m->heads * m->head, kv = (size_t)m->kv_heads * m->head;
    const int widest = m->width > (int)attention ? m->width : (int)attention;
    int fine = (m->layer = room(sizeof(layer) * m->layers)) != NULL;
    for (int i = 0; fine && i < m->layers; i++) {
        layer *l = &m->layer[i];
        fine = (l->keys = room(2 * kv * m->context)) && (l->values = room(2 * kv * m->context)) &&
               (l->tree_keys = room(4 * kv * m->nodes)) && (l->tree_values = room(4 * kv * m->nodes));
    }
    fine = fine && (m->cosines = room(2 * (size_t)m->context * m->head)) && (m->sines = room(2 * (size_t)m->context * m->head)) &&
           (m->x = room(4 * rows * m->width)) && (m->queries = room(4 * rows * attention)) &&
           (m->attended = room(4 * rows * attention)) && make_bytes(&m->shared, MOST_ROWS, widest) &&
           make_bytes(&m->hidden, MOST_ROWS, m->feed) && make_bytes(&m->own[0], FEW, widest) &&
           (m->notes[0] = room(sizeof(notes) * FEW));
    if (!fine) {
        duo_free(m);
        return NULL;
    }
    for (int p = 0; p < m->context; p++)
        for (int i = 0; i < m->head / 2; i++) {
            const double angle = (double)p * frequencies[i];
            m->cosines[(size_t)p * m->head / 2 + i] = (float)cos(angle);
            m->sines[(size_t)p * m->head / 2 + i] = (float)sin(angle);
        }
    return m;
}

static int copy_floats(float **to, const float *from, int count) {
    *to = room(sizeof(float) * count);
    if (*to) memcpy(*to, from, sizeof(float) * count);
    return *to != NULL;
}

/* Norms of a layer, or with layer -1 the last one (twice). 0: no memory. */
int duo_norms(duo_model *m, int layer, const float *attention, const float *feed) {
    if (layer < 0) return copy_floats(&m->last_norm, attention, m->width);
    return copy_floats(&m->layer[layer].attention_norm, attention, m->width) &&
           copy_floats(&m->layer[layer].feed_norm, feed, m->width);
}

/* What some models add to queries, keys and values (all of them, one after the other), or NULL; and norms of their heads, or NULL
   twice. 0: no memory. */
int duo_extras(duo_model *m, int layer, const float *bias, const float *query_norm, const float *key_norm) {
    const int count = (m->heads + 2 * m->kv_heads) * m->head;
    return (!bias || copy_floats(&m->layer[layer].bias, bias, count)) &&
           (!query_norm || copy_floats(&m->layer[layer].query_norm, query_norm, m->head)) &&
           (!key_norm || copy_floats(&m->layer[layer].key_norm, key_norm, m->head));
}

/* Matrix `which` of layer `number` (queries, keys, values, out, gate, up, down), or with -1 the head. 0: no memory. */
int duo_matrix(duo_model *m, int number, int which, int type, const uint8_t *data, int rows, int columns) {
    layer *l = &m->layer[number < 0 ? 0 : number];
    matrix *all[] = {&l->to_queries, &l->to_keys, &l->to_values, &l->out, &l->gate, &l->up, &l->down};
    return pack(&m->arena, number < 0 ? &m->head_matrix : all[which], type, data, rows, columns);
}

/* The embeddings stay where they are: `data` must live as long as the model. */
void duo_embeddings(duo_model *m, int type, const uint8_t *data) { m->embeddings = data, m->embeddings_type = type; }

/* Threads that wait for work, `spin_microseconds` awake and then asleep. Returns how many there are. */
int duo_start(duo_model *m, int threads, int spin_microseconds) {
    const int attention = m->heads * m->head, widest = m->width > attention ? m->width : attention;
    threads = threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
    m->spin_microseconds = spin_microseconds;
    int fine = 1, wanted = threads;
    for (int i = 1; i < threads && fine; i++) fine = make_bytes(&m->own[i], FEW, widest) && (m->notes[i] = room(sizeof(notes) * FEW));
    if (!fine) return 0;
    m->threads = wanted; /* before anybody looks */
    for (int i = 1; i < wanted; i++) {
        worker *self = malloc(sizeof(worker));
        if (self) *self = (worker){m, i};
        if (!self || pthread_create(&m->thread[i], NULL, serve, self)) {
            free(self);
            atomic_store(&m->leaving, 1);
            begin_work(m);
            for (int j = 1; j < i; j++) pthread_join(m->thread[j], NULL);
            m->threads = 1;
            return 0;
        }
    }
    return m->threads;
}

/* While the first byte of `flag` is not 0 a step ends early. */
void duo_stop_on(duo_model *m, const char *flag) { m->flag = flag; }

static int outside(int32_t value, int32_t end) { return value < 0 || value >= end; }

/* Does anything lie where there is no room? */
static int is_wrong(const duo_model *m, int rows, int outputs, int begin, const int32_t *tokens, const int32_t *positions,
                    const int32_t *places, const int32_t *ends, const int32_t *starts, const int32_t *ancestors) {
    int wrong = rows < 1 || rows > MOST_ROWS || outside(outputs, rows + 1) || outside(begin, m->context);
    for (int i = 0; i < rows && !wrong; i++)
        wrong = outside(tokens[i], m->vocabulary) || outside(positions[i], m->context) || outside(places[i], m->context + m->nodes) ||
                outside(ends[i], m->context + 1) || outside(starts[i + 1] - starts[i], MOST_ANCESTORS + 1);
    for (int i = 0; !wrong && i < starts[rows]; i++) wrong = outside(ancestors[i], m->nodes);
    return wrong;
}

/* A step over `rows` tokens. `places`: where a row's key goes: its position in the trunk, or context + node. A row sees the trunk
   from `begin` to its end, and the nodes ancestors[starts[row]] to ancestors[starts[row + 1]], itself among them if it is in the
   tree. Logits (outputs, vocabulary) of the last rows, and guesses if they are `wanted`. 0: done, 1: broken off, 2: no memory, 3: not
   possible. */
int duo_step(duo_model *m, int rows, int outputs, int begin, const int32_t *tokens, const int32_t *positions, const int32_t *places,
             const int32_t *ends, const int32_t *starts, const int32_t *ancestors, float *logits, const guesses *wanted) {
    int last = 0;
    if (is_wrong(m, rows, outputs, begin, tokens, positions, places, ends, starts, ancestors)) return 3;
    if (wanted && outside(outputs, FEW + 1)) return 3;
    for (int i = 0; i < rows; i++) last = ends[i] > last ? ends[i] : last;
    for (int i = 0; i < rows && m->exact; i++) last = ends[i] + starts[i + 1] - starts[i] > last ? ends[i] + starts[i + 1] - starts[i] : last;
    const int low = begin / LANES * LANES, few = rows <= FEW || m->exact;
    const int stretches = !few || last <= low ? 1 : (last - low + STRETCH - 1) / STRETCH;
    const size_t needed = (size_t)rows * m->heads * stretches * (2 + m->head);
    if (needed > m->parts_room) {
        free(m->parts);
        m->parts = room(sizeof(float) * needed);
        m->parts_room = m->parts ? needed : 0;
        if (!m->parts) return 2;
    }
    m->work = (work){rows, outputs, begin, stretches, tokens, positions, places, ends, starts, ancestors, logits, wanted};
    m->stopped = 0;
    begin_work(m);
    run(m, 0);
    meet(m, 0);
    if (wanted && outputs == 1 && !m->stopped) guess(m, 0);
    return m->stopped;
}

/* Keys and values of the first `count` positions of the trunk, to `state` or, `back`, from there. */
static size_t copy_trunk(duo_model *m, int count, uint8_t *state, int back) {
    const size_t keys = sizeof(uint16_t) * ((count + LANES - 1) / LANES * LANES) * m->head, values = sizeof(uint16_t) * count * m->head;
    uint8_t *at = state;
    for (int i = 0; i < m->layers && state; i++)
        for (int h = 0; h < m->kv_heads; h++) {
            uint16_t *k = m->layer[i].keys + (size_t)h * m->context * m->head, *v = m->layer[i].values + (size_t)h * m->context * m->head;
            memcpy(back ? (void *)k : at, back ? at : (void *)k, keys), at += keys;
            memcpy(back ? (void *)v : at, back ? at : (void *)v, values), at += values;
        }
    return (keys + values) * m->kv_heads * m->layers;
}

/* How many bytes that is; `state` may be NULL. */
size_t duo_save(duo_model *m, int count, uint8_t *state) { return copy_trunk(m, count, state, 0); }
void duo_restore(duo_model *m, int count, const uint8_t *state) { copy_trunk(m, count, (uint8_t *)state, 1); }

/* Make `count` nodes of the tree part of the trunk, at positions from `position` on. */
void duo_keep(duo_model *m, int count, const int32_t *nodes, int position) {
    for (int i = 0; i < m->layers; i++)
        for (int h = 0; h < m->kv_heads; h++)
            for (int n = 0; n < count; n++) {
                layer *l = &m->layer[i];
                const int at = position + n;
                const float *k = l->tree_keys + ((size_t)h * m->nodes + nodes[n]) * m->head;
                const float *v = l->tree_values + ((size_t)h * m->nodes + nodes[n]) * m->head;
                uint16_t *keys = l->keys + ((size_t)h * m->context + at / LANES * LANES) * m->head + at % LANES;
                uint16_t *values = l->values + ((size_t)h * m->context + at) * m->head;
                for (int d = 0; d < m->head; d++) keys[(size_t)d * LANES] = to_bf16(k[d]), values[d] = to_bf16(v[d]);
            }
}
