/* Outrider's CPU kernels: packed linear layers, paged attention, norms and rotary embedding, for bfloat16 and float32.
 *
 * One law holds for every kernel here: what is computed for a row depends on that row alone, bit for bit, never on how
 * many rows come with it or which thread takes it. Each output element is one fixed chain of operations. This is what
 * makes text the same with and without speculation.
 *
 * What this file is not: a matrix library for any shape or machine. It is plain C with GCC vector extensions, so it
 * also compiles without AVX-512; one block uses the bfloat16 dot product where the processor has it. The PyTorch
 * references beside the callers (models/linear.py, attention.py, layers.py) say what each kernel must equal.
 *
 * kernels.inc holds the code that exists once for each element type.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "parallel.h"
#if defined(__AVX512BF16__) && defined(__AVX512F__)
#include <immintrin.h>
#define HAVE_BF16_DOT 1
#else
#define HAVE_BF16_DOT 0
#endif

#define LANES 16
#define PANEL 32    /* output columns that are packed together: two vectors */
#define MAX_HEAD_VECTORS 32 /* the largest head: 512 */
#define ROWS_PER_ITEM 4 /* rows of the cheap kernels that a thread takes at once */
#ifdef __AVX512F__ /* rows that share one pass over a panel: their accumulators fill the vector registers */
#define MAX_ROWS 12
#else
#define MAX_ROWS 3
#endif

typedef uint16_t bf16;
typedef float vf __attribute__((vector_size(64), aligned(4)));
typedef int32_t vi __attribute__((vector_size(64), aligned(4)));
typedef uint32_t vu __attribute__((vector_size(64), aligned(4)));
typedef uint16_t vh __attribute__((vector_size(32), aligned(2)));
#define INLINE static inline __attribute__((always_inline))

INLINE vf splat(float x) { return (vf){0} + x; }

INLINE vf blend(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }

INLINE vf larger(vf a, vf b) { return blend(a > b, a, b); }

INLINE vf widen(vh h) { return (vf)(__builtin_convertvector(h, vu) << 16); }

INLINE vh narrow(vf x) { /* round to nearest, ties to even */
    vu u = (vu)x;
    return __builtin_convertvector((u + 0x7fff + ((u >> 16) & 1)) >> 16, vh);
}

INLINE float bf16_to_float(bf16 h) {
    union { uint32_t u; float f; } x = {(uint32_t)h << 16};
    return x.f;
}

INLINE bf16 float_to_bf16(float f) {
    union { float f; uint32_t u; } x = {f};
    return (bf16)((x.u + 0x7fff + ((x.u >> 16) & 1)) >> 16);
}

INLINE float sum_lanes(vf x) { /* a fixed tree */
    float a[LANES];
    memcpy(a, &x, sizeof a);
    for (int w = LANES / 2; w; w /= 2)
        for (int i = 0; i < w; i++) a[i] += a[i + w];
    return a[0];
}

INLINE float max_lanes(vf x) {
    float a[LANES];
    memcpy(a, &x, sizeof a);
    for (int w = LANES / 2; w; w /= 2)
        for (int i = 0; i < w; i++) a[i] = a[i] > a[i + w] ? a[i] : a[i + w];
    return a[0];
}

INLINE vf fast_exp(vf x) { /* e^x for x <= 0, relative error below 3e-7; flushes to zero under e^-87 */
    const vf low = splat(-87.0f);
    vf clipped = larger(x, low);
    vf n = clipped * 1.44269504088896341f;
    vi whole = __builtin_convertvector(n - 0.5f, vi); /* n <= 0, so this rounds to nearest */
    vf k = __builtin_convertvector(whole, vf);
    vf r = clipped - k * 0.693359375f;
    r = r + k * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vf scale = (vf)((whole + 127) << 23);
    return blend(x > low, p * scale, splat(0.0f));
}

/* Scratch memory that a thread keeps between calls. */
static float *thread_scratch(size_t count) {
    static __thread float *memory = NULL;
    static __thread size_t size = 0;
    if (count > size) {
        free(memory);
        memory = aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64);
        size = memory ? count : 0;
        if (!memory) abort();
    }
    return memory;
}

#define PASTE_(a, b) a##_##b
#define PASTE(a, b) PASTE_(a, b)
#define NAME(name) PASTE(name, SUFFIX)

#define SUFFIX bf16
#define ELEMENT bf16
#define PAIR 2
#define LOAD(p) widen(*(const vh *)(p))
#define STORE(p, x) (*(vh *)(p) = narrow(x))
#define TO_FLOAT bf16_to_float
#define FROM_FLOAT float_to_bf16
#include "kernels.inc"
#undef SUFFIX
#undef ELEMENT
#undef PAIR
#undef LOAD
#undef STORE
#undef TO_FLOAT
#undef FROM_FLOAT

#define SUFFIX f32
#define ELEMENT float
#define PAIR 1
#define LOAD(p) (*(const vf *)(p))
#define STORE(p, x) (*(vf *)(p) = (x))
#define TO_FLOAT
#define FROM_FLOAT
#include "kernels.inc"

struct gather_args {
    const char *table;
    const int64_t *rows;
    int64_t row_bytes, count;
    char *out;
};

static void gather_item(const void *args, int64_t item) {
    const struct gather_args *a = args;
    int64_t end = (item + 1) * 8 * ROWS_PER_ITEM;
    for (int64_t i = item * 8 * ROWS_PER_ITEM; i < (end < a->count ? end : a->count); i++)
        memcpy(a->out + i * a->row_bytes, a->table + a->rows[i] * a->row_bytes, a->row_bytes);
}

/* out[i] = table[rows[i]], whole rows of any type. */
void gather_rows(const void *table, int64_t row_bytes, const int64_t *rows, int64_t count, void *out) {
    struct gather_args args = {table, rows, row_bytes, count, out};
    parallel_for(gather_item, &args, (count + 8 * ROWS_PER_ITEM - 1) / (8 * ROWS_PER_ITEM));
}

struct scatter_args {
    char *table;
    const int32_t *rows;
    int64_t row_bytes, count;
    const char *values;
};

static void scatter_item(const void *args, int64_t item) {
    const struct scatter_args *a = args;
    int64_t end = (item + 1) * 8 * ROWS_PER_ITEM;
    for (int64_t i = item * 8 * ROWS_PER_ITEM; i < (end < a->count ? end : a->count); i++)
        memcpy(a->table + a->rows[i] * a->row_bytes, a->values + i * a->row_bytes, a->row_bytes);
}

/* table[rows[i]] = values[i], whole rows of any type; no row twice. */
void scatter_rows(void *table, int64_t row_bytes, const int32_t *rows, int64_t count, const void *values) {
    struct scatter_args args = {table, rows, row_bytes, count, values};
    parallel_for(scatter_item, &args, (count + 8 * ROWS_PER_ITEM - 1) / (8 * ROWS_PER_ITEM));
}
