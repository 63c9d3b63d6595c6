#ifndef DDL_RUNTIME_DESCRIPTION_H_
#define DDL_RUNTIME_DESCRIPTION_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/request.h"

namespace ddl {

// What a rank is about to do, in the form in which ranks compare it: one line each for op, name,
// options, step, learning rate, stream and hint, then one for each tensor.
std::string Describe(const Request& request);

// The request that such a text describes, without memory. Internal if it is no such text.
Status Parse(const std::string& description, Request* request);

// What of a request does not change from step to step. Of tensors that are gathered the first
// dimension is left out of the digest, because it may differ.
std::shared_ptr<const Signature> MakeSignature(const Request& request);

// 128 bits that differ where requests do not match, or `cancelled` differs: what a rank has
// cancelled, as a number. Some nanoseconds where the request has a signature.
void Digest(const Request& request, uint64_t cancelled, uint64_t digest[2]);

// `AllReduceN "loss/grads"`: op and name, for messages and to know a request by.
std::string Title(const std::string& description);
std::string Title(const Request& request);

// The stream of a request.
std::string StreamOf(const std::string& description);

// Whether both describe one collective: they are equal, but for the first dimensions of tensors
// that are gathered, and for what processors of two kinds make of one learning rate.
bool Compatible(const std::string& one, const std::string& other);

// The first difference between what two ranks ask for, as InvalidArgument: which tensor, which
// rank, what each of them asked for.
Status MismatchError(int rank, const std::string& theirs, int reference, const std::string& ours);

// One line: what users name must not break the lines of a description.
std::string OneLine(std::string text);

}  // namespace ddl

#endif  // DDL_RUNTIME_DESCRIPTION_H_
