#include "runtime/description.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <tuple>

#include "core/numbers.h"

namespace ddl {
namespace {

// Lines of a description.
enum Line : size_t {
  kOpLine,
  kNameLine,
  kOptionsLine,
  kStepLine,
  kRateLine,
  kStreamLine,
  kHintLine,
  kFirstTensorLine,
};

// The options of a collective whose tensors may differ in their first dimension.
constexpr char kFirstDimensionIsFree[] = "first dimension is free";
constexpr char kSplitsAreFree[] = "first dimension and splits are free";
constexpr char kScatterOption[] = "scattered ";
constexpr char kOpOption[] = "op=";
constexpr char kAverage[] = "avg";
constexpr char kAdasum[] = "adasum";
constexpr char kRootOption[] = "root=";
constexpr char kUnfusedOption[] = " mpi=true";
constexpr char kCheckOption[] = " check=";
constexpr char kOnGpu[] = "] on a GPU";
// Processors of two kinds may compute one schedule's rate some units in the last place apart. The
// weights, which they round as differently, are no worse for it.
constexpr double kSameRate = 1e-6;

std::vector<std::string> SplitLines(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t start = 0; start <= text.size();) {
    const size_t end = std::min(text.find('\n', start), text.size());
    lines.push_back(text.substr(start, end - start));
    start = end + 1;
  }
  lines.resize(std::max<size_t>(lines.size(), kFirstTensorLine));
  return lines;
}

bool IsFirstDimensionFree(const std::string& options) {
  return options == kFirstDimensionIsFree || options == kSplitsAreFree;
}

std::string OptionsOf(const Request& request) {
  if (request.kind == Request::Kind::kAllGather) return kFirstDimensionIsFree;
  if (request.kind == Request::Kind::kBroadcast) return kRootOption + std::to_string(request.root);
  if (request.kind == Request::Kind::kAllToAll) return kSplitsAreFree;
  std::string text = request.kind == Request::Kind::kReduceScatter ? kScatterOption : "";
  text += kOpOption;
  text += request.average ? kAverage : request.adasum ? kAdasum : ReduceOpName(request.op);
  if (request.unfused) text += kUnfusedOption;
  if (request.tolerance > 0) text += kCheckOption + Format("%g", request.tolerance);
  return text;
}

std::string TensorLine(const Request& request, size_t tensor) {
  std::string text = DTypeName(request.dtype);
  text += "[";
  const std::vector<int64_t>& dims = request.dims(tensor);
  for (size_t i = 0; i < dims.size(); ++i) {
    if (i > 0) text += ",";
    text += std::to_string(dims[i]);
  }
  return text + (request.gpu == nullptr ? "]" : kOnGpu);
}

// "float32[5,3]" -> "float32[?,3]"; a scalar, "float32[]", stays as it is.
std::string WithoutFirstDimension(std::string tensor) {
  const size_t start = tensor.find('[') + 1;
  const size_t length = tensor.find_first_of(",]", start) - start;
  return length == 0 ? tensor : tensor.replace(start, length, "?");
}

// The shortest text that stands for this number and no other one: "0.001".
std::string RateText(float rate) {
  if (std::isnan(rate)) return "nan";  // with whatever sign and payload
  std::string text;
  for (int digits = 1; digits <= std::numeric_limits<float>::max_digits10; ++digits) {
    text = Format("%.*g", digits, static_cast<double>(rate));
    if (static_cast<float>(ReadNumber(text.c_str(), nullptr)) == rate) break;
  }
  return text;
}

uint64_t RateWord(const std::optional<float>& rate) {
  if (!rate.has_value()) return 0;
  const float value = std::isnan(*rate) ? std::numeric_limits<float>::quiet_NaN() : *rate;
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return uint64_t{1} << 32 | bits;
}

bool SameRate(const std::string& one, const std::string& other) {
  if (one.empty() || other.empty()) return false;
  const double a = ReadNumber(one.c_str(), nullptr), b = ReadNumber(other.c_str(), nullptr);
  return std::abs(a - b) <= kSameRate * std::min(std::abs(a), std::abs(b));
}

// As people write it: "0.001" for "0.0009999999".
std::string RoundedRate(const std::string& rate) {
  return rate.empty() ? rate : Format("%.6g", ReadNumber(rate.c_str(), nullptr));
}

// All but the instance, the step and the rate, which change.
std::string Constant(const Request& request) {
  std::string text = request.op_name + "\n" + request.name + "\n" + OptionsOf(request) + "\n";
  text += request.stream;
  const bool free = IsFirstDimensionFree(OptionsOf(request));
  for (size_t i = 0; i < request.tensors.size(); ++i) {
    const std::string line = TensorLine(request, i);
    text += "\n" + (free ? WithoutFirstDimension(line) : line);
  }
  return text;
}

// Two multiplicative hashes with different odd factors, each step a bijection of the state. Source:
// the factors are those of SplitMix64 (Steele, Lea, Flood, 2014).
void Mix(uint64_t word, uint64_t digest[2]) {
  digest[0] = (digest[0] ^ word) * 0xbf58476d1ce4e5b9ull;
  digest[0] ^= digest[0] >> 32;
  digest[1] = (digest[1] + word) * 0x94d049bb133111ebull;
  digest[1] ^= digest[1] >> 29;
}

void MixText(const std::string& text, uint64_t digest[2]) {
  Mix(text.size(), digest);
  for (size_t at = 0; at < text.size(); at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, text.data() + at, std::min<size_t>(8, text.size() - at));
    Mix(word, digest);
  }
}

std::string Thread(const std::string& stream) {
  return stream.empty() ? "the main thread" : "thread \"" + stream + "\"";
}

}  // namespace

std::string Describe(const Request& request) {
  std::string text = request.op_name + "\n" + request.name + request.instance + "\n" +
                     OptionsOf(request) + "\n";
  if (request.step >= 0) text += "step " + std::to_string(request.step);
  text += "\n";
  if (request.rate.has_value()) text += RateText(*request.rate);
  text += "\n" + request.stream + "\n" + request.hint;
  for (size_t i = 0; i < request.tensors.size(); ++i) text += "\n" + TensorLine(request, i);
  return text;
}

Status Parse(const std::string& description, Request* request) {
  const std::vector<std::string> lines = SplitLines(description);
  const Status unreadable(Code::kInternal, Title(description) +
                                               ": cannot read what the other ranks run. Do all "
                                               "ranks run the same build of ddl?");
  *request = Request();
  request->op_name = lines[kOpLine];
  request->name = lines[kNameLine];
  std::string options = lines[kOptionsLine];
  if (options.rfind(kScatterOption, 0) == 0) {
    request->kind = Request::Kind::kReduceScatter;
    options.erase(0, sizeof(kScatterOption) - 1);
  }
  if (options == kFirstDimensionIsFree) {
    request->kind = Request::Kind::kAllGather;
  } else if (options == kSplitsAreFree) {
    request->kind = Request::Kind::kAllToAll;
  } else if (options.rfind(kRootOption, 0) == 0) {
    request->kind = Request::Kind::kBroadcast;
    request->root = std::atoi(options.c_str() + sizeof(kRootOption) - 1);
  } else {
    const size_t op = sizeof(kOpOption) - 1;
    const std::string how = options.substr(std::min(op, options.size()), options.find(' ') - op);
    request->average = how == kAverage;
    request->adasum = how == kAdasum;
    if (!request->average && !request->adasum && !FindReduceOp(how, &request->op)) {
      return unreadable;
    }
    request->unfused = options.find(kUnfusedOption) != std::string::npos;
    const size_t check = options.find(kCheckOption);
    if (check != std::string::npos) {
      const char* tolerance = options.c_str() + check + sizeof(kCheckOption) - 1;
      request->tolerance = ReadNumber(tolerance, nullptr);
    }
  }
  for (size_t i = kFirstTensorLine; i < lines.size(); ++i) {
    const size_t open = lines[i].find('[');
    if (open == std::string::npos || !FindDType(lines[i].substr(0, open), &request->dtype)) {
      return unreadable;
    }
    TensorBuffer tensor;
    const char* at = lines[i].c_str() + open + 1;
    while (*at != ']' && *at != '\0') {
      char* end = nullptr;
      tensor.dims.push_back(std::strtoll(at, &end, 10));
      if (end == at) return unreadable;
      at = *end == ',' ? end + 1 : end;
    }
    tensor.count = std::accumulate(tensor.dims.begin(), tensor.dims.end(), int64_t{1},
                                   std::multiplies<int64_t>());
    request->tensors.push_back(std::move(tensor));
  }
  return Status();
}

std::shared_ptr<const Signature> MakeSignature(const Request& request) {
  auto made = std::make_shared<Signature>();
  for (size_t i = 0; i < request.tensors.size(); ++i) made->dims.push_back(request.dims(i));
  MixText(Constant(request), made->digest);
  return made;
}

void Digest(const Request& request, uint64_t cancelled, uint64_t digest[2]) {
  const std::shared_ptr<const Signature> signature =
      request.signature != nullptr ? request.signature : MakeSignature(request);
  digest[0] = signature->digest[0];
  digest[1] = signature->digest[1];
  if (!request.instance.empty()) MixText(request.instance, digest);
  Mix(static_cast<uint64_t>(request.step), digest);
  Mix(RateWord(request.rate), digest);
  Mix(cancelled, digest);
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

std::string StreamOf(const std::string& description) {
  return SplitLines(description)[kStreamLine];
}

bool Compatible(const std::string& one, const std::string& other) {
  if (one == other) return true;
  const std::vector<std::string> a = SplitLines(one), b = SplitLines(other);
  const bool gathered = IsFirstDimensionFree(a[kOptionsLine]);
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (i == kHintLine || a[i] == b[i]) continue;
    if (i == kRateLine && SameRate(a[i], b[i])) continue;
    if (i < kFirstTensorLine || !gathered) return false;
    if (WithoutFirstDimension(a[i]) != WithoutFirstDimension(b[i])) return false;
  }
  return true;
}

Status MismatchError(int rank, const std::string& their_text, int reference,
                     const std::string& our_text) {
  const std::vector<std::string> theirs = SplitLines(their_text), ours = SplitLines(our_text);
  const std::string who = "rank " + std::to_string(rank);
  const std::string whom = "rank " + std::to_string(reference);
  const auto mismatch = [&](const std::string& text) {
    return Status(Code::kInvalidArgument, Title(our_text) + ": " + text);
  };
  for (const size_t line : {kOpLine, kNameLine}) {
    if (theirs[line] == ours[line]) continue;
    std::string advice = !theirs[kHintLine].empty() ? theirs[kHintLine] : ours[kHintLine];
    if (advice.empty()) {
      advice = "All ranks must run the same collectives in the same order: let each run the same "
               "program.";
    }
    return mismatch(who + " runs " + theirs[kOpLine] + " \"" + theirs[kNameLine] + "\", " + whom +
                    " runs " + ours[kOpLine] + " \"" + ours[kNameLine] + "\". " + advice);
  }
  if (theirs[kOptionsLine] != ours[kOptionsLine]) {
    return mismatch(who + " asks for " + theirs[kOptionsLine] + ", " + whom + " for " +
                    ours[kOptionsLine] + ". Give all ranks the same attributes.");
  }
  if (theirs[kStepLine] != ours[kStepLine]) {
    const auto step = [](const std::string& text) { return text.empty() ? "no step" : text; };
    return mismatch(who + " is at " + step(theirs[kStepLine]) + ", " + whom + " at " +
                    step(ours[kStepLine]) +
                    ". A rank has skipped or repeated a step: look for what it decides by itself.");
  }
  if (theirs[kRateLine] != ours[kRateLine] && !SameRate(theirs[kRateLine], ours[kRateLine])) {
    std::string rate = RoundedRate(theirs[kRateLine]), other = RoundedRate(ours[kRateLine]);
    if (rate == other) std::tie(rate, other) = std::tie(theirs[kRateLine], ours[kRateLine]);
    return mismatch(who + " has " + (rate.empty() ? "no" : "a") + " learning rate" +
                    (rate.empty() ? "" : " of " + rate) + ", " + whom + " " +
                    (other.empty() ? "none" : "one of " + other) +
                    ". Set it alike on all ranks. Where a callback does, as ReduceLROnPlateau, let "
                    "all ranks see the same metric: put MetricAverageCallback before it.");
  }
  if (theirs[kStreamLine] != ours[kStreamLine]) {
    return mismatch(who + " asks from " + Thread(theirs[kStreamLine]) + ", " + whom + " from " +
                    Thread(ours[kStreamLine]) + ". Ask for it from the same thread on all ranks.");
  }
  const size_t tensors = theirs.size() - kFirstTensorLine;
  if (theirs.size() != ours.size()) {
    return mismatch(who + " sent " + std::to_string(tensors) + " tensors, " + whom + " " +
                    std::to_string(ours.size() - kFirstTensorLine) +
                    ". All ranks must pass the same number of tensors.");
  }
  const bool gathered = IsFirstDimensionFree(ours[kOptionsLine]);
  for (size_t i = kFirstTensorLine; i < theirs.size(); ++i) {
    if (gathered ? WithoutFirstDimension(theirs[i]) == WithoutFirstDimension(ours[i])
                 : theirs[i] == ours[i]) {
      continue;
    }
    return mismatch(who + " sent " + theirs[i] + " as tensor " +
                    std::to_string(i - kFirstTensorLine) + ", " + whom + " " + ours[i] +
                    (gathered
                         ? ". All dimensions but the first, and the dtype, must agree on all ranks."
                         : ". Shape, dtype and kind of device must agree on all ranks."));
  }
  return mismatch(who + " differs from " + whom + ".");
}

std::string OneLine(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < ' '; }, ' ');
  return text;
}

}  // namespace ddl
