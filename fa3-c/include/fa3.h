/* FlashAttention-3 for NVIDIA Hopper, as a C library. It also computes on the CPU.
 *
 * A call is an operation over named tensors, with options. It is planned once for shapes, strides and types, and
 * launched any number of times with other addresses. Lengths, cu_seqlens and page tables are data in the memory of the
 * tensors: a plan does not depend on them.
 *
 * All functions may be called from any thread. A plan may be launched by several threads at a time, each with a
 * workspace of its own.
 */
#ifndef FA3_H
#define FA3_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The device of calls on the CPU. Other devices are GPUs, as CUDA numbers them. */
#define FA3_CPU (-1)

/* The result of a function. fa3_last_error explains any but FA3_OK. */
enum {
    FA3_OK = 0,
    /* A name, a tensor, an option or an address is wrong. */
    FA3_INVALID = 1,
    /* The call is valid, but nothing here computes it. */
    FA3_UNSUPPORTED = 2,
    /* There is no driver or no such GPU, or the driver or the system reports an error. */
    FA3_MACHINE = 3,
    /* A bug of this library. */
    FA3_BUG = 4
};

/* The type of a tensor's elements. */
enum { FA3_F32 = 0, FA3_F16 = 1, FA3_BF16 = 2, FA3_E4M3 = 3, FA3_I32 = 4, FA3_INT8 = 5 };

/* A tensor of a call. Names are those of the operation, such as "q". Dimensions are (batch, seqlen, heads, head_dim),
 * and (total, heads, head_dim) for packed sequences. Strides count elements; NULL stands for a contiguous tensor. The
 * library keeps no pointer of this structure. */
typedef struct fa3_tensor {
    const char *name;
    int32_t dtype;
    int32_t rank;
    const int64_t *shape;
    const int64_t *strides;
} fa3_tensor;

/* An option of a call. A number or a flag (1 or 0) has one value, "window" has three: keys to the left and to the right
 * of a query (-1: all), and keys of a chunk (0: no chunks). {-1, 0, 0} is a causal mask. */
typedef struct fa3_option {
    const char *name;
    double values[3];
} fa3_option;

/* A call, planned, and compiled for its device. */
typedef struct fa3_plan fa3_plan;

/* The version of this library. */
const char *fa3_version(void);

/* The message of the last function that failed in this thread; an empty string if none did. It is valid until another
 * function fails in this thread. */
const char *fa3_last_error(void);

/* Plans an operation, and compiles its kernels for the device, whose primary context it uses. Operations are "forward",
 * "append", "backward", "fp8_forward", "quantize" and "combine". fa3_free frees the plan. */
int fa3_plan_new(const char *operation, int32_t device, const fa3_tensor *tensors, size_t tensor_count,
                 const fa3_option *options, size_t option_count, fa3_plan **plan);

/* The bytes of the workspace that a launch needs, in the memory of the device. It begins at a multiple of 256 bytes, and
 * is filled with zeros once, before its first launch. The largest workspace serves all plans that are launched on one
 * stream. 0 on the CPU. */
size_t fa3_workspace_bytes(const fa3_plan *plan);

/* Puts the call on a stream of the plan's device, a CUstream or cudaStream_t, and returns at once. On the CPU it
 * returns when the call is done, and the stream is not used. `data` has the address of each tensor, in the order of
 * fa3_plan_new. The tensors, the workspace and the plan live until the work is done. A captured graph holds all of
 * these addresses. */
int fa3_launch(const fa3_plan *plan, void *stream, void *const *data, void *workspace);

/* Frees a plan, if it is not NULL. The work of its launches must be done. */
void fa3_free(fa3_plan *plan);

#ifdef __cplusplus
}
#endif

#endif
