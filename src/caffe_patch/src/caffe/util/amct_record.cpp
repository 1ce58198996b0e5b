#include "caffe/util/amct_record.hpp"

#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "caffe/common.hpp"
#include "caffe/util/io.hpp"

namespace caffe {
namespace amct {

namespace {

void Replace(const std::string& path, const std::string& written) {
  CHECK_EQ(std::rename(written.c_str(), path.c_str()), 0) << path << ": cannot be written";
}

}  // namespace

ScaleOffsetRecord ReadRecord(const std::string& path) {
  ScaleOffsetRecord record;
  CHECK(std::ifstream(path.c_str()).good())
      << "record_file_path: the record \"" << path << "\" does not exist; a prototxt creates no files. Make the model "
      << "again with the functions of amct_caffe";
  CHECK(ReadProtoFromTextFile(path.c_str(), &record)) << path << ": is not a record of quantization factors";
  return record;
}

void WriteRecord(const std::string& path, const ScaleOffsetRecord& record) {
  WriteProtoToTextFile(record, (path + ".new").c_str());
  Replace(path, path + ".new");
}

void WriteText(const std::string& path, const std::string& text) {
  {
    std::ofstream file((path + ".new").c_str());
    file << text;
    CHECK(file.good()) << path << ": cannot be written";
  }
  Replace(path, path + ".new");
}

SingleLayerRecord* EntryOf(const std::string& layer, ScaleOffsetRecord* record) {
  for (int i = 0; i < record->record_size(); ++i) {
    if (record->record(i).key() == layer) return record->mutable_record(i)->mutable_value();
  }
  ScaleOffsetRecord::MapFiledEntry* entry = record->add_record();
  entry->set_key(layer);
  return entry->mutable_value();
}

void SetInput(const ActivationQuantParam& factors, SingleLayerRecord* entry) {
  std::vector<ActivationQuantParam> inputs;
  bool is_in = false;
  for (int i = 0; i < entry->record_d_size(); ++i) {
    if (entry->record_d(i).index() == factors.index()) continue;
    if (!is_in && entry->record_d(i).index() > factors.index()) {
      inputs.push_back(factors);
      is_in = true;
    }
    inputs.push_back(entry->record_d(i));
  }
  if (!is_in) inputs.push_back(factors);
  entry->clear_record_d();
  for (size_t i = 0; i < inputs.size(); ++i) entry->add_record_d()->CopyFrom(inputs[i]);
}

ActivationQuantParam InputFactors(float scale, int offset, int index, int bits, const std::vector<int>& shape) {
  ActivationQuantParam factors;
  factors.set_scale_d(scale);
  factors.set_offset_d(offset);
  factors.set_index(index);
  if (shape.size() == 4) {
    factors.set_channels(shape[1]);
    factors.set_height(shape[2]);
    factors.set_width(shape[3]);
  }
  factors.set_num_bits_d(bits);
  return factors;
}

}  // namespace amct
}  // namespace caffe
