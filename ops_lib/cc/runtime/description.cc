#include "runtime/description.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace ddl {
namespace {

// Lines of a description.
constexpr size_t kOpLine = 0;
constexpr size_t kNameLine = 1;
constexpr size_t kOptionsLine = 2;
constexpr size_t kFirstTensorLine = 3;

// The options of a collective whose tensors may differ in their first dimension.
constexpr char kFirstDimensionIsFree[] = "first dimension is free";

std::vector<std::string> SplitLines(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t start = 0; start <= text.size();) {
    const size_t end = std::min(text.find('\n', start), text.size());
    lines.push_back(text.substr(start, end - start));
    start = end + 1;
  }
  return lines;
}

bool FirstDimensionIsFree(const std::vector<std::string>& lines) {
  return lines.size() > kOptionsLine && lines[kOptionsLine] == kFirstDimensionIsFree;
}

// "float32[5,3]" -> "float32[?,3]"; a scalar, "float32[]", stays as it is.
std::string WithoutFirstDimension(std::string tensor) {
  const size_t start = tensor.find('[') + 1;
  const size_t length = tensor.find_first_of(",]", start) - start;
  return length == 0 ? tensor : tensor.replace(start, length, "?");
}

// The first difference between what rank `rank` and rank 0 sent.
std::string Difference(int rank, const std::vector<std::string>& theirs,
                       const std::vector<std::string>& ours) {
  const std::string who = "rank " + std::to_string(rank);
  for (const size_t line : {kOpLine, kNameLine}) {
    if (theirs[line] != ours[line]) {
      return who + " runs " + theirs[kOpLine] + " \"" + theirs[kNameLine] + "\", rank 0 runs " +
             ours[kOpLine] + " \"" + ours[kNameLine] +
             "\". All ranks must run the same collectives in the same order: let each run the same "
             "program.";
    }
  }
  if (theirs[kOptionsLine] != ours[kOptionsLine]) {
    return who + " asks for " + theirs[kOptionsLine] + ", rank 0 for " + ours[kOptionsLine] +
           ". Give all ranks the same attributes.";
  }
  const size_t tensors = theirs.size() - kFirstTensorLine;
  if (theirs.size() != ours.size()) {
    return who + " sent " + std::to_string(tensors) + " tensors, rank 0 " +
           std::to_string(ours.size() - kFirstTensorLine) +
           ". All ranks must pass the same number of tensors.";
  }
  for (size_t i = 0; i < tensors; ++i) {
    if (theirs[kFirstTensorLine + i] != ours[kFirstTensorLine + i]) {
      return who + " sent " + theirs[kFirstTensorLine + i] + " as tensor " + std::to_string(i) +
             ", rank 0 " + ours[kFirstTensorLine + i] +
             (FirstDimensionIsFree(ours)
                  ? ". All dimensions but the first, and the dtype, must agree on all ranks."
                  : ". Shape, dtype and kind of device must agree on all ranks.");
    }
  }
  return who + " differs from rank 0.";
}

}  // namespace

std::string Describe(const Request& request) {
  std::string text = request.op_name + "\n" + request.name + request.instance + "\n";
  if (request.kind == Request::Kind::kAllReduce) {
    text += request.average ? "op=avg" : "op=sum";
    if (request.unfused) text += " mpi=true";
    if (request.tolerance > 0) text += " check=" + std::to_string(request.tolerance);
  } else if (request.kind == Request::Kind::kAllGather) {
    text += kFirstDimensionIsFree;
  }
  for (const TensorBuffer& tensor : request.tensors) {
    text += "\n";
    text += DTypeName(request.dtype);
    text += "[";
    for (size_t i = 0; i < tensor.dims.size(); ++i) {
      if (i > 0) text += ",";
      text += std::to_string(tensor.dims[i]);
    }
    text += request.place == nullptr ? "]" : "] on a GPU";
  }
  return text;
}

void Digest(const std::string& description, uint64_t digest[2]) {
  // Two multiplicative hashes with different odd factors, each step a bijection of the state, eight
  // bytes at a time. Source: the factors are those of SplitMix64 (Steele, Lea, Flood, 2014).
  uint64_t a = description.size(), b = ~a;
  for (size_t at = 0; at < description.size(); at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, description.data() + at, std::min<size_t>(8, description.size() - at));
    a = (a ^ word) * 0xbf58476d1ce4e5b9ull;
    a ^= a >> 32;
    b = (b + word) * 0x94d049bb133111ebull;
    b ^= b >> 29;
  }
  digest[0] = a;
  digest[1] = b;
}

std::string Title(const std::string& description) {
  const size_t op = description.find('\n');
  if (op == std::string::npos) return description;
  const size_t name = description.find('\n', op + 1);
  return description.substr(0, op) + " \"" + description.substr(op + 1, name - op - 1) + "\"";
}

std::string Title(const Request& request) {
  return request.op_name + " \"" + request.name + request.instance + "\"";
}

std::string Essence(const std::string& description) {
  // Looked for before anything is taken apart: most descriptions are long and have it not.
  if (description.find(kFirstDimensionIsFree) == std::string::npos) return description;
  const std::vector<std::string> lines = SplitLines(description);
  if (!FirstDimensionIsFree(lines)) return description;
  std::string text;
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) text += "\n";
    text += i < kFirstTensorLine ? lines[i] : WithoutFirstDimension(lines[i]);
  }
  return text;
}

Status Compare(const std::vector<std::string>& descriptions) {
  for (size_t rank = 1; rank < descriptions.size(); ++rank) {
    if (descriptions[rank] == descriptions[0]) continue;
    if (Essence(descriptions[rank]) == Essence(descriptions[0])) continue;
    return Status(Code::kInvalidArgument,
                  Title(descriptions[0]) + ": " +
                      Difference(static_cast<int>(rank), SplitLines(descriptions[rank]),
                                 SplitLines(descriptions[0])));
  }
  return Status();
}

}  // namespace ddl
