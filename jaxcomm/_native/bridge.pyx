# cython: language_level=3, embedsignature=True
# distutils: language = c++
"""The only door between Python and the native layer: tables, capsules, eager calls."""

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libcpp cimport bool as cbool
from libcpp.string cimport string
from libcpp.vector cimport vector

cdef extern from "native.hpp" namespace "jaxcomm" nogil:
    ctypedef long long Count

    cdef cppclass Status:
        pass

    cdef struct Constants:
        void* in_place
        int any_source, any_tag, proc_null, tag_ub
        uint64_t op_null
        size_t status_source_at, status_tag_at
        Count small_count_limit
    Constants constants

    cdef cppclass Communicator:
        uint64_t handle, shadow
        int rank, size
        string name
        cbool freed

    cdef cppclass Reduction:
        const void* handle_at
        string name

    cdef cppclass Datatype:
        uint64_t handle
        int per_element, bytes
        string name

    cdef cppclass Table[Row]:
        int64_t add(Row) except +
        Row& at(int64_t) except +
    cdef cppclass Sites:
        void add(int64_t, string) except +
    Sites sites
    Table[Communicator] communicators
    Table[Reduction] reductions
    Table[Status*] statuses
    Table[Datatype] datatypes
    int64_t datatype_of_code[64]

    cdef cppclass Attributes:
        cbool set(string, int64_t)

    cdef struct Buffer:
        void* data
        Count elements
        int code

    cdef cppclass Frame:
        Buffer operands[16]
        Buffer results[16]
        int n_operands, n_results
        Attributes attributes
        Status* status

    cdef struct Outcome:
        int code
        string message

    cdef struct Operation:
        const char* name
        void* ffi_handler

    string load_mpi(string, cbool)
    cbool has_large_counts "jaxcomm::has_large_counts"()
    void set_debug_ "jaxcomm::set_debug"(cbool)
    vector[Operation] operations()
    int operation_index_ "jaxcomm::operation_index"(string)
    Outcome run_operation(int, Frame&)
    int64_t add_own_reduction_ "jaxcomm::add_own_reduction"(string, string) except +
    void free_communicator_ "jaxcomm::free_communicator"(int64_t) except +

# The head of NumPy's array struct, whose layout its C API fixes: reading it costs nothing, while the buffer protocol
# refuses bfloat16 and `ndarray.ctypes` takes a microsecond.
cdef extern from *:
    """
    #include <Python.h>
    typedef struct { PyObject_HEAD char* data; } JaxcommArrayHead;
    """
    ctypedef struct JaxcommArrayHead:
        char* data

TRACED = -2**63
"""The value of an attribute that is a scalar operand at run time."""

for _code in range(64):
    datatype_of_code[_code] = -1


class NativeError(Exception):
    """An operation failed: args are MPI's error code (-1 where MPI was not the cause) and the message."""


def load(str library_path, bint handles_are_pointers):
    """Bind the MPI entry points of a library that is loaded already; ImportError says what is missing."""
    cdef string error = load_mpi(library_path.encode(), handles_are_pointers)
    if not error.empty():
        raise ImportError(error.decode())


def set_constants(*, in_place, op_null, int any_source, int any_tag, int proc_null, int tag_ub,
                  size_t status_source_at, size_t status_tag_at):
    """Tell the native layer what an mpi.h would have told it."""
    constants.in_place = <void*><uintptr_t>(in_place & 0xFFFFFFFFFFFFFFFF)
    constants.op_null = op_null & 0xFFFFFFFFFFFFFFFF
    constants.any_source, constants.any_tag, constants.proc_null = any_source, any_tag, proc_null
    constants.tag_ub = tag_ub
    constants.status_source_at, constants.status_tag_at = status_source_at, status_tag_at


def add_datatype(int code, uint64_t handle, int per_element, int itemsize, str name):
    """Say which MPI datatype carries XLA's element type `code`."""
    cdef Datatype row
    row.handle, row.per_element, row.bytes, row.name = handle, per_element, itemsize, name.encode()
    datatype_of_code[code] = datatypes.add(row)


def add_communicator(uint64_t handle, uint64_t shadow, int rank, int size, str name):
    """Return the index by which compiled programs name this communicator.

    `shadow` is a duplicate, or the same handle, for the messages that differentiation adds.
    """
    cdef Communicator row
    row.shadow = shadow
    row.handle, row.rank, row.size, row.name = handle, rank, size, name.encode()
    return communicators.add(row)


def free_communicator(int64_t index):
    """Mark the slot: every later call on it fails, and no other communicator takes it."""
    free_communicator_(index)


def rename_communicator(int64_t index, str name):
    """Use `name` in messages from now on."""
    communicators.at(index).name = name.encode()


def add_reduction(uintptr_t handle_at, str name):
    """Return the index by which compiled programs name the MPI operation whose handle is kept at an address."""
    cdef Reduction row
    row.handle_at, row.name = <const void*>handle_at, name.encode()
    return reductions.add(row)


def add_own_reduction(str name, str dtype):
    """Make an operation of reduce_ops.hpp and return the index by which compiled programs name it."""
    return add_own_reduction_(name.encode(), dtype.encode())


def add_status(uintptr_t address):
    """Return the index of an MPI_Status in memory that the caller keeps alive."""
    return statuses.add(<Status*>address)


def add_site(int64_t number, str text):
    """Say where the operations are written that carry this number."""
    sites.add(number, text.encode())


def large_counts():
    """Whether the MPI library has the large-count functions of MPI 4."""
    return has_large_counts()


def set_debug(bint on):
    """Log every operation to stderr."""
    set_debug_(on)


def capsules():
    """Return {operation: capsule of its XLA FFI handler}."""
    return {op.name.decode(): PyCapsule_New(op.ffi_handler, NULL, NULL) for op in operations()}


def operation_index(str name):
    """Return the number by which `call` knows an operation."""
    cdef int index = operation_index_(name.encode())
    if index < 0:
        raise KeyError(name)
    return index


cdef class Plan:
    """An operation with everything but the buffers: what the eager path keeps for the next call of the same kind."""

    cdef Frame frame
    cdef int operation

    def __init__(self, int operation, list operands, list results, dict attributes):
        """Prepare.

        Args:
          operation: from operation_index.
          operands, results: for each array its number of elements and XLA's element type.
          attributes: {name: int}.
        """
        cdef int i
        self.operation = operation
        self.frame.n_operands, self.frame.n_results = len(operands), len(results)
        for i, (elements, code) in enumerate(operands):
            self.frame.operands[i].elements, self.frame.operands[i].code = elements, code
        for i, (elements, code) in enumerate(results):
            self.frame.results[i].elements, self.frame.results[i].code = elements, code
        for name, value in attributes.items():
            self.frame.attributes.set((<str>name).encode(), value)

    def run(self, list operands, list results, uintptr_t status):
        """Run on C-contiguous NumPy arrays, with the GIL released.

        Args:
          operands: arrays as prepared for. results: likewise; they are overwritten.
          status: address of an MPI_Status to fill, or 0.
        Raises:
          NativeError: with MPI's error code and the message.
        """
        cdef Frame frame = self.frame
        cdef Outcome outcome
        cdef int i
        for i in range(frame.n_operands):
            frame.operands[i].data = (<JaxcommArrayHead*><void*>operands[i]).data
        for i in range(frame.n_results):
            frame.results[i].data = (<JaxcommArrayHead*><void*>results[i]).data
        frame.status = <Status*>status
        with nogil:
            outcome = run_operation(self.operation, frame)
        if outcome.code != 0:
            raise NativeError(outcome.code, outcome.message.decode())
