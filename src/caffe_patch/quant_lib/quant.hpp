// The arithmetic of quantization as a library with a plain C interface: no Caffe inside, no other library needed.
//
// Functions that can fail return 0 on success; otherwise quant_error() tells what was wrong, in the calling thread.
#ifndef AMCT_QUANT_HPP_
#define AMCT_QUANT_HPP_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

const char* quant_error(void);

// -- Affine quantization: q = clamp(round(x * (1 / scale)) + offset), x' = (q - offset) * scale; halves go to even -----

// Whether scale and offset are legal for integers of so many bits (2..16).
int quant_check_factors(float scale, int32_t offset, int bits);

// Scale and offset of a range. A range of practically nothing gets scale 1, and near_zero is 1.
int quant_factors(double minimum, double maximum, int bits, int with_offset, float* scale, int32_t* offset,
                  int* near_zero);

// Fails where a value is NaN.
int quant_quantize(const float* x, size_t count, float scale, int32_t offset, int bits, int32_t* q);
void quant_dequantize(const int32_t* q, size_t count, float scale, int32_t offset, float* x);
// NaN stays NaN. x and out may be the same.
void quant_fake(const float* x, size_t count, float scale, int32_t offset, int bits, float* out);
// The straight-through gradient: that of the output inside of the range of integers, 0 outside.
void quant_fake_gradient(const float* x, const float* upstream, size_t count, float scale, int32_t offset, int bits,
                         float* gradient);

// -- IFMR: the range with the least mean squared error of rounding -----------------------------------------------------

typedef struct {
  int bits;
  int with_offset;
  double search_start, search_end, search_step;
  double max_percentile, min_percentile;
  // How many batches will come; 0: it is not known.
  int64_t batches;
} quant_ifmr_settings;

typedef struct {
  float scale;
  int32_t offset;
  // The range that was chosen.
  float clip_min, clip_max;
  int near_zero;
} quant_ifmr_result;

typedef struct quant_ifmr quant_ifmr;

// Returns null on failure. Up to 65536 values are kept, more are counted; memory does not grow with the batches.
quant_ifmr* quant_ifmr_new(const quant_ifmr_settings* settings);
int quant_ifmr_observe(quant_ifmr* observer, const float* x, size_t count);
int quant_ifmr_find(quant_ifmr* observer, quant_ifmr_result* result);
void quant_ifmr_free(quant_ifmr* observer);

// -- Weights: rows are output channels ---------------------------------------------------------------------------------

// ARQ: the scales of the largest magnitudes, one for each row or, not channel_wise, one in all.
int quant_arq(const float* rows, size_t row_count, size_t row_size, int bits, int channel_wise, float* scales);
// Round rows to the grid of their scales; with one scale it is that of all rows.
void quant_fake_rows(const float* rows, size_t row_count, size_t row_size, int bits, const float* scales,
                     size_t scale_count, float* out);
// SNQ: look up 4-bit indices (two in a byte, the low half first, rows padded to a byte) in tables of 16 values, one for
// each row or one in all.
void quant_snq_decode(const uint8_t* packed, size_t row_count, size_t row_size, const int8_t* tables,
                      size_t table_count, int8_t* rows);

// The integers and scales of weights that were rounded and dequantized: one scale, or one for each row. scales has room
// for one of each row. bias may be null; it is whole steps of scale_data times a scale. Fails if they are on no grid.
int quant_find_integers(const float* rows, size_t row_count, size_t row_size, const float* bias, float scale_data,
                        int8_t* integers, float* scales, size_t* scale_count);
// The step of the sums of each row with this data, and the bias in steps. A row of zeros has one step, its bias. bias may
// be null, then there are no bias_steps.
void quant_sum_steps(const int8_t* integers, size_t row_count, size_t row_size, const float* scales,
                     size_t scale_count, const float* bias, float scale_data, int32_t* bias_steps, float* steps);

// -- ULQ: rounding between two clips that are trained ------------------------------------------------------------------

// Replaces a clip that an update made illegal by the last legal one; tells whether one was replaced.
int quant_ulq_legal(float* clip_min, float* clip_max, float valid_min, float valid_max);
void quant_ulq_factors(float clip_min, float clip_max, int bits, float* scale, int32_t* offset);
void quant_ulq_forward(const float* x, size_t count, float clip_min, float clip_max, int bits, float* out);
void quant_ulq_backward(const float* x, const float* upstream, size_t count, float clip_min, float clip_max, int bits,
                        float* gradient, float* gradient_min, float* gradient_max);

// -- Statistics of a BatchNorm, and sums of integers -------------------------------------------------------------------

// Mean and variance of each channel of one batch (N, C, the rest) join the sums that Caffe keeps in its three blobs.
void quant_bn_update(const float* x, size_t samples, size_t channels, size_t inner, float fraction, float* mean_sum,
                     float* variance_sum, float* weight);

// Exact sums of products: out[m, n] = sum of w[m, k] * (x[k, n] - offset), for data of 8 to 16 bits.
void quant_integer_gemm(const int8_t* w, const int16_t* x, size_t m, size_t k, size_t n, int32_t offset, int64_t* out);
// Real numbers of sums: (sum + bias) * step, one step or one for each row, rounded once. bias may be null.
void quant_dequantize_sums(const int64_t* sums, size_t m, size_t n, const int32_t* bias, const float* steps,
                           size_t step_count, float* out);

#ifdef __cplusplus
}
#endif

#endif  // AMCT_QUANT_HPP_
