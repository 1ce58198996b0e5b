#pragma once
#include <fstream>
#include <sstream>
#include <string>

#include "caffe/common.hpp"
#include "caffe/proto/caffe.pb.h"

namespace caffe {

template <typename Message>
bool ReadProtoFromTextFile(const char* path, Message* message) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  small::Words words(text.str());
  try {
    message->Parse(&words);
  } catch (const std::exception&) {
    return false;
  }
  return words.AtEnd();
}

template <typename Message>
void WriteProtoToTextFile(const Message& message, const char* path) {
  std::ofstream(path) << message.DebugString();
}

template <typename Message>
void WriteProtoToBinaryFile(const Message& message, const string& path) {
  const string bytes = message.SerializeAsString();
  std::ofstream(path.c_str(), std::ios::binary).write(bytes.data(), bytes.size());
}

}  // namespace caffe
