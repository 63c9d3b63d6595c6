#include "runtime/cancelled_run.h"

#include <algorithm>
#include <cstdlib>
#include <functional>

#include "runtime/description.h"

namespace ddl {
namespace {

using Pending = CancelledRun::Pending;

void AddLine(const std::string& line, std::string* text) { *text += OneLine(line) + "\n"; }

void AddNumber(int64_t number, std::string* text) { AddLine(std::to_string(number), text); }

std::string NextLine(const std::string& text, size_t* at) {
  const size_t begin = *at, end = std::min(text.find('\n', begin), text.size());
  *at = end + 1;
  return text.substr(begin, end - begin);
}

int64_t NextNumber(const std::string& text, size_t* at) {
  return std::atoll(NextLine(text, at).c_str());
}

void AddIdentity(const CancelledRun& run, std::string* text) {
  AddNumber(run.position, text);
  AddNumber(static_cast<int64_t>(run.pending.size()), text);
  for (const Pending& one : run.pending) {
    AddLine((one.id.ordered ? "O" : "U") + one.id.stream, text);
    AddLine(one.id.title, text);
    AddNumber(one.ahead, text);
  }
}

bool SameId(const Pending& one, const Pending& other) {
  return one.id.stream == other.id.stream && one.id.title == other.id.title;
}

bool SameStream(const Pending& one, const Pending& other) {
  return one.id.stream == other.id.stream;
}

bool AnySame(const CancelledRun& one, const CancelledRun& other,
             bool (*same)(const Pending&, const Pending&)) {
  return std::any_of(one.pending.begin(), one.pending.end(), [&](const Pending& ours) {
    return std::any_of(other.pending.begin(), other.pending.end(),
                       [&](const Pending& theirs) { return same(ours, theirs); });
  });
}

}  // namespace

std::string Identity(const std::vector<CancelledRun>& runs) {
  std::string text;
  for (const CancelledRun& run : runs) AddIdentity(run, &text);
  return text;
}

std::string Encode(const std::vector<CancelledRun>& runs) {
  std::string text;
  AddNumber(static_cast<int64_t>(runs.size()), &text);
  for (const CancelledRun& run : runs) {
    AddIdentity(run, &text);
    AddLine(run.reason, &text);
    AddNumber(static_cast<int64_t>(run.ranks.size()), &text);
    for (const int rank : run.ranks) AddNumber(rank, &text);
  }
  return text;
}

std::vector<CancelledRun> DecodeCancelledRuns(const std::string& text, size_t* at) {
  std::vector<CancelledRun> runs(NextNumber(text, at));
  for (CancelledRun& run : runs) {
    run.position = NextNumber(text, at);
    run.pending.resize(NextNumber(text, at));
    for (Pending& one : run.pending) {
      const std::string stream = NextLine(text, at);
      one.id.ordered = stream[0] == 'O';
      one.id.stream = stream.substr(1);
      one.id.title = NextLine(text, at);
      one.ahead = NextNumber(text, at);
    }
    run.reason = NextLine(text, at);
    run.ranks.resize(NextNumber(text, at));
    for (int& rank : run.ranks) rank = static_cast<int>(NextNumber(text, at));
  }
  return runs;
}

std::vector<CancelledRun>::iterator FindSame(std::vector<CancelledRun>* runs,
                                             const CancelledRun& run) {
  const auto find = [&](const std::function<bool(const CancelledRun&)>& same) {
    return std::find_if(runs->begin(), runs->end(), [&](const CancelledRun& one) {
      // A rank has cancelled each of its own once.
      const bool of_its_rank =
          std::find_first_of(one.ranks.begin(), one.ranks.end(), run.ranks.begin(),
                             run.ranks.end()) != one.ranks.end();
      return !of_its_rank && same(one);
    });
  };
  if (run.position >= 0) {
    return find([&](const CancelledRun& one) { return one.position == run.position; });
  }
  const auto same =
      find([&](const CancelledRun& one) { return AnySame(one, run, SameId); });
  if (same != runs->end()) return same;
  return find([&](const CancelledRun& one) { return AnySame(one, run, SameStream); });
}

void Merge(const CancelledRun& run, std::vector<CancelledRun>* runs) {
  const auto same = FindSame(runs, run);
  if (same == runs->end()) {
    runs->push_back(run);
    return;
  }
  same->ranks.insert(same->ranks.end(), run.ranks.begin(), run.ranks.end());
  for (const Pending& one : run.pending) {
    const bool known = std::any_of(same->pending.begin(), same->pending.end(),
                                   [&](const Pending& other) { return SameId(one, other); });
    if (!known) same->pending.push_back(one);
  }
}

}  // namespace ddl
