// What the classes made of messages have in common: text, and bytes as protobuf writes them.
#ifndef SMALL_CAFFE_MESSAGES_HPP_
#define SMALL_CAFFE_MESSAGES_HPP_

#include <cctype>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace small {

// A text of protobuf, word by word.
class Words {
 public:
  explicit Words(const std::string& text) : text_(text), at_(0) {}
  bool AtEnd() { return Peek().empty(); }
  bool Accept(const std::string& word) {
    const size_t before = at_;
    if (Next() == word) return true;
    at_ = before;
    return false;
  }
  std::string Peek() {
    const size_t before = at_;
    const std::string word = Next();
    at_ = before;
    return word;
  }
  std::string Next() {
    while (at_ < text_.size() && (isspace(text_[at_]) || text_[at_] == ',' || text_[at_] == ';')) ++at_;
    const size_t begin = at_;
    if (at_ == text_.size()) return "";
    if (text_[at_] == '"') return String();
    if (strchr("{}:[]", text_[at_])) return std::string(1, text_[at_++]);
    while (at_ < text_.size() && !isspace(text_[at_]) && !strchr("{}:[],;", text_[at_])) ++at_;
    return text_.substr(begin, at_ - begin);
  }

 private:
  std::string String() {
    std::string found = "\"";
    for (++at_; text_.at(at_) != '"'; ++at_) {
      if (text_[at_] != '\\') {
        found += text_[at_];
      } else if (isdigit(text_.at(++at_))) {
        found += static_cast<char>(strtol(text_.substr(at_, 3).c_str(), NULL, 8));
        at_ += 2;
      } else {
        found += text_[at_] == 'n' ? '\n' : text_[at_] == 't' ? '\t' : text_[at_] == 'r' ? '\r' : text_[at_];
      }
    }
    ++at_;
    return found;
  }

  const std::string text_;
  size_t at_;
};

template <typename Value>
inline void Read(Words* words, Value* value) {
  const std::string word = words->Next();
  char* end;
  *value = static_cast<Value>(strtod(word.c_str(), &end));
  if (word.empty() || *end) throw std::runtime_error("expected a number, found " + word);
}
inline void Read(Words* words, bool* value) { *value = words->Next() == "true"; }
inline void Read(Words* words, std::string* value) { *value = words->Next().substr(1); }

template <typename Value>
inline std::string Text(const Value& value) {
  char text[40];
  snprintf(text, sizeof(text), "%.9g", static_cast<double>(value));
  return text;
}
inline std::string Text(bool value) { return value ? "true" : "false"; }
inline std::string Text(const std::string& value) {
  std::string text = "\"";
  for (unsigned char each : value) {
    char code[5];
    snprintf(code, sizeof(code), "\\%03o", each);
    text += each < 32 || each > 126 || each == '"' || each == '\\' ? std::string(code) : std::string(1, each);
  }
  return text + "\"";
}

inline std::string Varint(uint64_t value) {
  std::string bytes;
  for (; value > 127; value >>= 7) bytes += static_cast<char>(value | 128);
  return bytes + static_cast<char>(value);
}
inline std::string Tag(int number, int kind) { return Varint(static_cast<uint64_t>(number) << 3 | kind); }
inline std::string Bytes(int number, const std::string& value) { return Tag(number, 2) + Varint(value.size()) + value; }
inline std::string Bytes(int number, float value) {
  return Tag(number, 5) + std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}
inline std::string Bytes(int number, double value) {
  return Tag(number, 1) + std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}
template <typename Value>
inline std::string Bytes(int number, Value value) {
  return Tag(number, 0) + Varint(static_cast<uint64_t>(static_cast<int64_t>(value)));
}

template <typename Item>
class Repeated : public std::vector<Item> {
 public:
  void CopyFrom(const Repeated& other) { *this = other; }
};

}  // namespace small

#endif  // SMALL_CAFFE_MESSAGES_HPP_
