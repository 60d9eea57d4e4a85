// Convolution of channels-last images on Hopper's matrix units, with what follows it done before the result leaves the chip:
// the residual is added, and the sums that a batch norm needs are taken.
//
// An implicit matrix product: rows are output pixels, columns are output channels, and the inner dimension runs over the
// taps of the filter and, within a tap, the input channels. One warp copies tiles into shared memory (the copy engine makes
// the rows of a tap out of the image, zeros at its margins); two groups of four warps multiply, half of the rows each.
// A tile has 256 rows. Rows that would keep few multiprocessors busy at the end are done in tiles of 128.
// The residual comes the same way as the images, as one more tap whose filter is the identity. Results are left in shared
// memory, from where the copy engine writes them while the next tile is multiplied.
//
// Defined outside: BN (columns of a tile, a multiple of 32), TAIL (steps of 16 in the last block of channels, 1 or 2),
// STAGES (tiles of shared memory), BF16 (0 or 1), ACCUMULATORS (the registers of one product), OPERANDS (their constraints).

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

struct alignas(64) Map {
    u64 words[16];
};

constexpr int BM = 256;                            // rows of a tile
constexpr int BK = 32;                             // channels of a block: 64 bytes, the width of the swizzle
constexpr u32 HALF = BM / 2 * BK * 2;              // bytes of 128 rows of a block
constexpr u32 B_BYTES = BN * BK * 2;
constexpr u32 STAGE = 2 * HALF + B_BYTES;
constexpr u32 RESULTS = STAGES * STAGE;            // [2 groups][2 x 64 rows][BN / 32][64 rows][32 columns]
constexpr u32 RESULT = 64 * BN * 2;                // bytes of 64 rows
constexpr u32 SUMS = RESULTS + 4 * RESULT;         // [8 warps][2][BN] floats
constexpr u32 BARRIERS = SUMS + 8 * 2 * BN * 4;

struct Tile {
    bool whole;
    int number, first, column;                     // of all tiles with these columns; its first row; its first column
};

__device__ __forceinline__ Tile tile_at(int i, int whole_rows, int column_tiles) {
    int row = i / column_tiles, more = row - whole_rows;
    return {more < 0, row, row * BM - max(more, 0) * (BM / 2), i % column_tiles * BN};
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void await(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "AGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra READY;\n"
        "bra AGAIN;\n"
        "READY:\n"
        "}\n" ::"r"(barrier), "r"(parity) : "memory");
}

// A tile in shared memory as the matrix units want it described: rows of 64 bytes, swizzled in groups of eight.
__device__ __forceinline__ u64 described(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | (32ull << 32) | (2ull << 62);
}

__device__ __forceinline__ void multiply(float (&d)[BN / 2], u64 a, u64 b, int add) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %" ADD ", 0;\n"
#if BF16
        "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32.bf16.bf16 "
#else
        "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32.f16.f16 "
#endif
        ACCUMULATORS ", %" LEFT ", %" RIGHT ", p, 1, 1, 0, 0;\n"
        "}\n"
        : OPERANDS(d) : "l"(a), "l"(b), "r"(add));
}

__device__ __forceinline__ u32 packed(float low, float high) {
    u32 out;
#if BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
#endif
    return out;
}

// Two threads share out the 2 KEPT sums that both hold; each goes on with its half of the columns.
template <int KEPT>
__device__ __forceinline__ void halve(float (&total)[16], int lane) {
    bool high = lane & (2 * KEPT);
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        float given = high ? total[i] : total[i + KEPT], kept = high ? total[i + KEPT] : total[i];
        total[i] = kept + __shfl_xor_sync(0xFFFFFFFF, given, 2 * KEPT);
    }
}

struct Ring {                                      // where in shared memory the next tile is
    u32 stage, phase;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) { stage = 0; phase ^= 1; }
    }
};

__device__ __forceinline__ void copy_filters(u32 to, const Map& filters, u32 barrier, int channel, int tap, int column) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
        ::"r"(to), "l"(&filters), "r"(barrier), "r"(channel), "r"(tap), "r"(column) : "memory");
}

__device__ __forceinline__ void copy_matrix(u32 to, const Map& matrix, u32 barrier, int channel, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
        ::"r"(to), "l"(&matrix), "r"(barrier), "r"(channel), "r"(row) : "memory");
}

__device__ __forceinline__ void copy_pixels(
    u32 to, const Map& images, u32 barrier, int channel, int x, int y, int n, u16 tap_x, u16 tap_y)
{
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};"
        ::"r"(to), "l"(&images), "r"(barrier), "r"(channel), "r"(x), "r"(y), "r"(n), "h"(tap_x), "h"(tap_y) : "memory");
}

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// All products of a tile, and from step `products` on its residuals.
template <bool WHOLE>
__device__ __forceinline__ void multiply_all(
    float (&upper)[BN / 2], float (&lower)[BN / 2], Ring& ring, int products, int steps, int blocks, u32 base, u32 full,
    u32 empty, int group, int lane)
{
    u32 before = 0;
    const u32 own = (group - 1) * (WHOLE ? HALF : HALF / 2);
#if TAIL < 2
    int block = 0;
#endif
    for (int step = 0; step < steps; step++) {
        await(full + 8 * ring.stage, ring.phase);
        u32 at = base + ring.stage * STAGE;
        u64 a = described(at + own), b = described(at + 2 * HALF);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < TAIL; k++) {
            multiply(upper, a + 2 * k, b + 2 * k, step | k);
            if (WHOLE) multiply(lower, a + 256 + 2 * k, b + 2 * k, step | k);
        }
#if TAIL < 2
        if (++block < blocks || step >= products) {
            multiply(upper, a + 2, b + 2, 1);
            if (WHOLE) multiply(lower, a + 256 + 2, b + 2, 1);
        } else {
            block = 0;
        }
#endif
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (step) {                                // the products of the step before are done: its stage is free
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (lane == 0) arrive(empty + 8 * before);
        }
        before = ring.stage;
        ring.next();
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (lane == 0) arrive(empty + 8 * before);
}

// 16 rows of a warp, from its accumulators to the results in shared memory, in the swizzle of 64 bytes.
__device__ __forceinline__ void leave_rows(const float (&d)[BN / 2], u32 results, int warp, int lane) {
    int row = warp % 4 * 16 + lane % 16;
#pragma unroll
    for (int j = 0; j < BN / 8; j += 2) {
        const float* v = d + j * 4;
        int eight = j % 4 + lane / 16;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                     ::"r"(results + j / 4 * 4096 + row * 64 + (eight ^ (row >> 1 & 3)) * 16), "r"(packed(v[0], v[1])),
                       "r"(packed(v[2], v[3])), "r"(packed(v[4], v[5])), "r"(packed(v[6], v[7])) : "memory");
    }
}

// 64 rows of results on their way to memory; what lies beyond the last row or column is left out.
__device__ __forceinline__ void send_rows(u32 results, const Map& out, int column, int row) {
#pragma unroll
    for (int chunk = 0; chunk < BN / 32; chunk++)
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
                     ::"l"(&out), "r"(results + chunk * 4096), "r"(column + chunk * 32), "r"(row) : "memory");
}

// Adds a thread's rows to its sums and sums of squares of eight of 32 columns; lanes of equal lane % 4 have the same eight.
__device__ __forceinline__ void sum_rows(const float* d, float (&total)[16]) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
        int at = i / 4 * 2 + i % 2;                // two of each eight
        total[at] += d[i];
        total[8 + at] += d[i] * d[i];
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) convolution(
    const __grid_constant__ Map images, const __grid_constant__ Map filters, const __grid_constant__ Map others,
    const __grid_constant__ Map identity, const __grid_constant__ Map out, const u16* residual, float* sums, int height,
    int width, int stride, int pad_y, int pad_x, int taps, int taps_x, int blocks, int rows, int columns, int column_tiles,
    int whole_rows, int tiles)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    u32 base = (u32)__cvta_generic_to_shared(memory);
    u32 full = base + BARRIERS, empty = full + 8 * STAGES;
    int group = threadIdx.x / 128;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full + 8 * i));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 8;" ::"r"(empty + 8 * i));
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    Ring ring = {0, 0};
    int products = taps * blocks, steps = products + (residual != nullptr ? BN / BK : 0);

    if (group == 0) {                              // copies
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x != 0) return;
        for (int i = blockIdx.x; i < tiles; i += gridDim.x) {
            Tile tile = tile_at(i, whole_rows, column_tiles);
            int x[2], y[2], n[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int row = tile.first + half * (BM / 2), left = row % (height * width);
                n[half] = row / (height * width);
                y[half] = left / width * stride - pad_y;
                x[half] = left % width * stride - pad_x;
            }
            if (residual != nullptr && tile.column == 0) {     // those of all columns, into the cache
                u32 bytes = min(tile.whole ? BM : BM / 2, rows - tile.first) * columns * 2;
                asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
                             ::"l"(residual + (size_t)tile.first * columns), "r"(bytes) : "memory");
            }
            u32 pixels = tile.whole ? 2 * HALF : HALF;
            for (int tap = 0; tap < taps; tap++) {
                u16 tap_y = tap / taps_x, tap_x = tap % taps_x;
                for (int block = 0; block < blocks; block++) {
                    await(empty + 8 * ring.stage, ring.phase ^ 1);
                    u32 barrier = full + 8 * ring.stage, at = base + ring.stage * STAGE;
                    expect(barrier, pixels + B_BYTES);
                    copy_pixels(at, images, barrier, block * BK, x[0], y[0], n[0], tap_x, tap_y);
                    if (tile.whole)
                        copy_pixels(at + HALF, images, barrier, block * BK, x[1], y[1], n[1], tap_x, tap_y);
                    copy_filters(at + 2 * HALF, filters, barrier, block * BK, tap, tile.column);
                    ring.next();
                }
            }
            for (int block = 0; block < steps - products; block++) {
                await(empty + 8 * ring.stage, ring.phase ^ 1);
                u32 barrier = full + 8 * ring.stage, at = base + ring.stage * STAGE;
                expect(barrier, pixels + B_BYTES);
                copy_matrix(at, others, barrier, tile.column + block * BK, tile.first);
                if (tile.whole)
                    copy_matrix(at + HALF, others, barrier, tile.column + block * BK, tile.first + BM / 2);
                copy_matrix(at + 2 * HALF, identity, barrier, block * BK, 0);
                ring.next();
            }
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;       // warps 0 to 7
    float upper[BN / 2], lower[BN / 2];                             // the group's first 64 rows, and the next
    u32 results = base + RESULTS + (group - 1) * 2 * RESULT;
    bool leader = threadIdx.x % 128 == 0;
    for (int i = blockIdx.x; i < tiles; i += gridDim.x) {
        Tile tile = tile_at(i, whole_rows, column_tiles);
        if (tile.whole) {
            multiply_all<true>(upper, lower, ring, products, steps, blocks, base, full, empty, group, lane);
        } else {
            multiply_all<false>(upper, lower, ring, products, steps, blocks, base, full, empty, group, lane);
        }
#pragma unroll
        for (int j = 0; j < BN / 2; j++) asm volatile("" : "+f"(upper[j]), "+f"(lower[j])::"memory");

        if (leader) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");     // the results before are on their way
        asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory");
        leave_rows(upper, results, warp, lane);
        if (tile.whole) leave_rows(lower, results + RESULT, warp, lane);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory");
        if (leader) {
            int row = tile.first + (group - 1) * (tile.whole ? 128 : 64);
            send_rows(results, out, tile.column, row);
            if (tile.whole) send_rows(results + RESULT, out, tile.column, row + 64);
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }

        if (sums == nullptr) continue;
#pragma unroll
        for (int chunk = 0; chunk < BN / 32; chunk++) {
            float total[16];
#pragma unroll
            for (int j = 0; j < 16; j++) total[j] = 0.0f;
            sum_rows(upper + chunk * 16, total);
            if (tile.whole) sum_rows(lower + chunk * 16, total);
            halve<8>(total, lane);                 // each exchange halves what a thread holds
            halve<4>(total, lane);
            halve<2>(total, lane);
            int at = chunk * 32 + (lane >> 3 & 1) * 16 + (lane >> 2 & 1) * 8 + lane % 4 * 2;
            *(float2*)(memory + SUMS + ((warp * 2 + (lane >> 4)) * BN + at) * 4) = make_float2(total[0], total[1]);
        }
        asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory");
        const float* parts = (const float*)(memory + SUMS) + (group - 1) * 4 * 2 * BN;
        for (int j = threadIdx.x % 128; j < 2 * BN; j += 128) {     // over the group's warps, always in the same order
            int at = tile.column + j % BN;
            if (at < columns)
                sums[((size_t)(tile.number * 2 + group - 1) * 2 + j / BN) * columns + at] =
                    parts[j] + parts[2 * BN + j] + parts[4 * BN + j] + parts[6 * BN + j];
        }
    }
    if (leader) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
