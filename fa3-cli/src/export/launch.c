/* Launches the kernels of this folder through the driver. `load` loads them, `launch` puts them on a stream, and `main`
 * runs the test vector of the folder on the first GPU:
 *
 *     cc launch.c -o launch -ldl -lm && ./launch .
 *
 * It needs no CUDA toolkit: the driver's functions are found at run time.
 */
#include <dlfcn.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The driver's interface, as far as it is used here. */
typedef uint64_t CUdeviceptr;
typedef struct CUstream_st *CUstream;
typedef struct { _Alignas(64) uint64_t opaque[16]; } CUtensorMap;
typedef struct {
    int id;
    char pad[4];
    union { char bytes[64]; struct { unsigned x, y, z; } cluster; int allowed; } value;
} CUlaunchAttribute;
typedef struct {
    unsigned grid[3], block[3], smem;
    CUstream stream;
    CUlaunchAttribute *attributes;
    unsigned attribute_count;
} CUlaunchConfig;

static int (*cuInit)(unsigned), (*cuDriverGetVersion)(int *), (*cuDeviceGet)(int *, int);
static int (*cuDeviceGetAttribute)(int *, int, int), (*cuDevicePrimaryCtxRetain)(void **, int);
static int (*cuCtxSetCurrent)(void *), (*cuCtxSynchronize)(void);
static int (*cuModuleLoadData)(void **, const void *), (*cuModuleGetFunction)(void **, void *, const char *);
static int (*cuFuncSetAttribute)(void *, int, int);
static int (*cuLaunchKernelEx)(const CUlaunchConfig *, void *, void **, void **);
static int (*cuTensorMapEncodeTiled)(CUtensorMap *, int, unsigned, void *, const uint64_t *, const uint64_t *,
                                     const uint32_t *, const uint32_t *, int, int, int, int);
static int (*cuMemAlloc)(CUdeviceptr *, size_t), (*cuMemsetD8)(CUdeviceptr, unsigned char, size_t);
static int (*cuMemcpyHtoD)(CUdeviceptr, const void *, size_t), (*cuMemcpyDtoH)(void *, CUdeviceptr, size_t);

static const struct { const char *name; void *at; } functions[] = {
    {"cuInit", &cuInit}, {"cuDriverGetVersion", &cuDriverGetVersion}, {"cuDeviceGet", &cuDeviceGet},
    {"cuDeviceGetAttribute", &cuDeviceGetAttribute}, {"cuDevicePrimaryCtxRetain", &cuDevicePrimaryCtxRetain},
    {"cuCtxSetCurrent", &cuCtxSetCurrent}, {"cuCtxSynchronize", &cuCtxSynchronize},
    {"cuModuleLoadData", &cuModuleLoadData}, {"cuModuleGetFunction", &cuModuleGetFunction},
    {"cuFuncSetAttribute", &cuFuncSetAttribute}, {"cuLaunchKernelEx", &cuLaunchKernelEx},
    {"cuTensorMapEncodeTiled", &cuTensorMapEncodeTiled}, {"cuMemAlloc_v2", &cuMemAlloc},
    {"cuMemsetD8_v2", &cuMemsetD8}, {"cuMemcpyHtoD_v2", &cuMemcpyHtoD}, {"cuMemcpyDtoH_v2", &cuMemcpyDtoH},
};

enum elem { U8, U32, U64, F32, F16, BF16, E4M3 };

/* A tensor of the caller's. `before` and `after` are files with its contents in the test vector. */
struct tensor {
    const char *name;
    enum elem elem;
    size_t bytes;
    const char *before, *after;
};

/* An argument: a number of 32 or 64 bits, an address, or a tensor map over an address. An address is a tensor, or, if
 * `tensor` is -1, it lies `number` bytes behind the workspace's beginning. */
struct argument {
    enum { BITS32, BITS64, ADDRESS, MAP } kind;
    uint64_t number;
    int tensor;
    struct {
        int type;
        unsigned rank;
        uint64_t dims[5], strides[4];
        uint32_t box[5], steps[5];
        int interleave, swizzle, promotion, fill;
    } map;
};

/* A launch. If `is_early`, it may begin before the launch before it has ended: the kernel itself waits for it. */
struct step {
    const char *file, *entry;
    unsigned grid[3], block, cluster, smem;
    int is_early;
    unsigned count;
    const struct argument *arguments;
};

/*TABLES*/
enum { MOST_ARGUMENTS = 64, STEPS = sizeof steps / sizeof *steps, TENSORS = sizeof tensors / sizeof *tensors };

static void *kernels[STEPS];
static int is_early_known;

static int failed(const char *what, const char *name, int code) {
    fprintf(stderr, "%s %s: error %d\n", what, name, code);
    return code ? code : 1;
}

/* The contents of FOLDER/NAME.EXTENSION, and a zero behind it. */
static char *contents(const char *folder, const char *name, const char *extension, size_t *bytes) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s%s", folder, name, extension);
    FILE *file = fopen(path, "rb");
    if (!file) return NULL;
    fseek(file, 0, SEEK_END);
    *bytes = (size_t)ftell(file);
    rewind(file);
    char *text = calloc(*bytes + 1, 1);
    if (text && fread(text, 1, *bytes, file) != *bytes) free(text), text = NULL;
    fclose(file);
    return text;
}

/* Loads the kernels into the current context: machine code if the folder has it, otherwise PTX. */
int load(const char *folder) {
    int version = 0;
    cuDriverGetVersion(&version);
    is_early_known = version >= 12030;
    for (unsigned i = 0; i < STEPS; i++) {
        size_t bytes;
        void *module;
        char *image = contents(folder, steps[i].file, ".cubin", &bytes);
        if (!image) image = contents(folder, steps[i].file, ".ptx", &bytes);
        if (!image) return failed("no file of kernel", steps[i].file, 0);
        int code = cuModuleLoadData(&module, image);
        free(image);
        if (!code) code = cuModuleGetFunction(&kernels[i], module, steps[i].entry);
        /* The maximal size of dynamic shared memory, and clusters of more than 8. */
        if (!code) code = cuFuncSetAttribute(kernels[i], 8, (int)steps[i].smem);
        if (!code && steps[i].cluster > 8) code = cuFuncSetAttribute(kernels[i], 14, 1);
        if (code) return failed("kernel", steps[i].entry, code);
    }
    return 0;
}

/* Puts all kernels on a stream. `addresses` has the tensors in the order of the table; an optional tensor may be 0. The
 * workspace begins at a multiple of 256 bytes, and its first COUNTER_BYTES are 0 before the first launch. */
int launch(CUstream stream, const CUdeviceptr *addresses, CUdeviceptr workspace) {
    for (unsigned i = 0; i < STEPS; i++) {
        const struct step *step = &steps[i];
        CUtensorMap images[MOST_ARGUMENTS];
        void *pointers[MOST_ARGUMENTS];
        for (unsigned j = 0; j < step->count; j++) {
            const struct argument *x = &step->arguments[j];
            uint64_t address = x->tensor < 0 ? workspace + x->number : addresses[x->tensor];
            pointers[j] = &images[j];
            memset(&images[j], 0, sizeof *images);
            images[j].opaque[0] = x->kind == ADDRESS ? address : x->kind == MAP ? 0 : x->number;
            if (x->kind == MAP && address) {
                int code = cuTensorMapEncodeTiled(
                    &images[j], x->map.type, x->map.rank, (void *)(uintptr_t)address, x->map.dims, x->map.strides,
                    x->map.box, x->map.steps, x->map.interleave, x->map.swizzle, x->map.promotion, x->map.fill);
                if (code) return failed("a tensor map of", step->entry, code);
            }
        }
        CUlaunchAttribute attributes[2];
        memset(attributes, 0, sizeof attributes);
        CUlaunchConfig config = {{step->grid[0], step->grid[1], step->grid[2]}, {step->block, 1, 1}, step->smem,
                                 stream, attributes, 0};
        if (step->cluster > 1) {
            CUlaunchAttribute *cluster = &attributes[config.attribute_count++];
            cluster->id = 4;
            cluster->value.cluster.x = step->cluster, cluster->value.cluster.y = cluster->value.cluster.z = 1;
        }
        if (step->is_early && is_early_known) {
            CUlaunchAttribute *early = &attributes[config.attribute_count++];
            early->id = 6, early->value.allowed = 1;
        }
        int code = cuLaunchKernelEx(&config, kernels[i], pointers, NULL);
        if (code) return failed("the launch of", step->entry, code);
    }
    return 0;
}

#ifndef WITHOUT_MAIN
/* Element i of a tensor. */
static double element(enum elem elem, const char *at, size_t i) {
    static const int exponent_bits[] = {0, 0, 0, 8, 5, 8, 4}, mantissa_bits[] = {8, 32, 64, 23, 10, 7, 3};
    int exponents = exponent_bits[elem], mantissas = mantissa_bits[elem], is_float = exponents > 0;
    size_t bytes = (size_t)(is_float + exponents + mantissas) / 8;
    uint64_t bits = 0;
    memcpy(&bits, at + i * bytes, bytes);
    if (!is_float) return (double)bits;
    int most = (1 << exponents) - 1, exponent = (int)(bits >> mantissas) & most;
    double mantissa = (double)(bits & (((uint64_t)1 << mantissas) - 1)), sign = bits >> (exponents + mantissas) ? -1 : 1;
    if (elem == E4M3 && (bits & 0x7f) == 0x7f) return NAN;
    if (elem != E4M3 && exponent == most) return mantissa > 0 ? NAN : sign * INFINITY;
    mantissa = ldexp(mantissa, -mantissas) + (exponent > 0);
    return sign * ldexp(mantissa, (exponent > 0 ? exponent : 1) - most / 2);
}

static int skipped(const char *why) {
    printf("skipped: %s\n", why);
    return 0;
}

/* Runs the test vector. */
int main(int count, char **words) {
    static const double tolerances[] = {0, 0, 0, 1e-3, 0.004, 0.02, 0.25};
    const char *folder = count > 1 ? words[1] : ".";
    void *library = dlopen("libcuda.so.1", RTLD_NOW), *context;
    if (!library) return skipped("no libcuda");
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *function = dlsym(library, functions[i].name);
        if (!function) return skipped("the driver is older than CUDA 12");
        memcpy(functions[i].at, &function, sizeof function);
    }
    int device, major = 0, minor = 0, wrong = 0, code = cuInit(0);
    if (code || cuDeviceGet(&device, 0)) return skipped("no GPU");
    cuDeviceGetAttribute(&major, 75, device), cuDeviceGetAttribute(&minor, 76, device);
    if (major != 9 || minor != 0) return skipped("the first GPU is no Hopper");
    code = cuDevicePrimaryCtxRetain(&context, device);
    if (!code) code = cuCtxSetCurrent(context);
    if (code) return failed("the context of", "the first GPU", code);
    code = load(folder);
    if (code) return code;

    CUdeviceptr addresses[TENSORS], workspace = 0;
    for (int i = 0; i < TENSORS; i++) {
        size_t bytes = 0;
        char *before = tensors[i].before ? contents(folder, tensors[i].before, "", &bytes) : NULL;
        if (bytes != tensors[i].bytes && tensors[i].before) return failed("the contents of", tensors[i].name, 0);
        code = cuMemAlloc(&addresses[i], tensors[i].bytes);
        if (!code && before) code = cuMemcpyHtoD(addresses[i], before, bytes);
        /* An output that is not written shows: it is NaN. */
        else if (!code) code = cuMemsetD8(addresses[i], 0xff, tensors[i].bytes);
        free(before);
        if (code) return failed("the memory of", tensors[i].name, code);
    }
    if (WORKSPACE_BYTES > 0) code = cuMemAlloc(&workspace, WORKSPACE_BYTES);
    if (!code && WORKSPACE_BYTES > 0) code = cuMemsetD8(workspace, 0, WORKSPACE_BYTES);
    if (!code) code = launch(NULL, addresses, workspace);
    if (!code) code = cuCtxSynchronize();
    if (code) return failed("the launches on", "the first GPU", code);

    for (int i = 0; i < TENSORS; i++) {
        const struct tensor *x = &tensors[i];
        size_t bytes, counts[] = {1, 4, 8, 4, 2, 2, 1}, differing = 0;
        if (!x->after) continue;
        char *after = contents(folder, x->after, "", &bytes), *found = malloc(x->bytes);
        if (!after || !found || bytes != x->bytes) return failed("the expected", x->name, 0);
        code = cuMemcpyDtoH(found, addresses[i], x->bytes);
        if (code) return failed("the result", x->name, code);
        double largest = 0;
        for (size_t j = 0; j < x->bytes / counts[x->elem]; j++) {
            double expected = element(x->elem, after, j), is = element(x->elem, found, j);
            if (is == expected || (isnan(is) && isnan(expected))) continue;
            double difference = fabs(is - expected) / (1 + fabs(expected));
            differing += 1;
            if (!(difference <= largest)) largest = difference;
        }
        int is_right = largest <= tolerances[x->elem];
        printf("%s: %s, %zu elements differ, by at most %g\n", x->name, is_right ? "right" : "WRONG", differing, largest);
        wrong |= !is_right;
        free(after), free(found);
    }
    return wrong;
}
#endif
