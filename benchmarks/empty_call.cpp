// A custom call that does nothing: what any custom call costs.
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error Empty(ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer>) { return ffi::Error::Success(); }

XLA_FFI_DEFINE_HANDLER_SYMBOL(benchmark_empty, Empty, ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
