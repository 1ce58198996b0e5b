// The record of quantization factors: a file of text that several layers, and other programs, write to.
#ifndef CAFFE_UTIL_AMCT_RECORD_HPP_
#define CAFFE_UTIL_AMCT_RECORD_HPP_

#include <string>
#include <vector>

#include "caffe/proto/caffe.pb.h"

namespace caffe {
namespace amct {

// Ends with an error if there is no record: a prototxt creates no files.
ScaleOffsetRecord ReadRecord(const std::string& path);
// Writes the whole record, so that a reader never sees a part of it.
void WriteRecord(const std::string& path, const ScaleOffsetRecord& record);
// The same for any text.
void WriteText(const std::string& path, const std::string& text);

// The entry of a layer, made if there is none.
SingleLayerRecord* EntryOf(const std::string& layer, ScaleOffsetRecord* record);
// Put the factors of one input into an entry, at its index.
void SetInput(const ActivationQuantParam& factors, SingleLayerRecord* entry);
// The factors of one input; channels, height and width of blobs with four axes.
ActivationQuantParam InputFactors(float scale, int offset, int index, int bits, const std::vector<int>& shape);

}  // namespace amct
}  // namespace caffe

#endif  // CAFFE_UTIL_AMCT_RECORD_HPP_
