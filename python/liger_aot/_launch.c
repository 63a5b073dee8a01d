/* liger_aot._launch: loads ahead-of-time compiled kernels into a CUDA or HIP driver and launches them.
 *
 * Built for the limited API of Python 3.10, so that one binary serves every later version. Its parts:
 *   _native/driver.h, driver.c, cuda.c, hip.c   the driver, without Python
 *   _native/driver_object.c                     the type Driver
 *   _native/loaded_kernel.c                     a kernel of a loaded image, for the types Kernel and Binary
 *   _native/kernel_object.c, arguments.c        the type Kernel and what it packs
 *   _native/tensor_map.c                        the type TensorMap
 *   _native/binary_object.c, triton_launcher.c  the types Binary and TritonLauncher, for kernels that Triton launches
 *   _native/call_key.c                          which calls of a function Triton has one kernel for
 *   _native/tensor_rows.c                       reading a tensor through DLPack
 * This file is the module itself. Its state lives in the module, under the GIL; global is a count of forks alone. */
#include "_native/module.h"

static ModuleState *state_of(PyObject *module) { return PyModule_GetState(module); }

static int add_type(PyObject *module, PyType_Spec *spec, const char *name, PyObject **kept) {
    *kept = PyType_FromModuleAndSpec(module, spec, NULL);
    if (*kept == NULL) return -1;
    return PyModule_AddObjectRef(module, name, *kept);
}

static int module_execute(PyObject *module) {
    ModuleState *state = state_of(module);
    const struct {
        PyObject **name;
        const char *text;
    } names[] = {
        {&state->is_neg, "is_neg"},
        {&state->requires_grad, "requires_grad"},
        {&state->data_ptr, "data_ptr"},
        {&state->dtype, "dtype"},
        {&state->base, "base"},
        {&state->shape, "shape"},
        {&state->strides, "strides"},
        {&state->padding, "padding"},
        {&state->tf32, "round_f32_to_tf32"},
        {&state->calls, "calls"},
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if ((*names[i].name = PyUnicode_InternFromString(names[i].text)) == NULL) return -1;
    if (add_type(module, &driver_type_spec, "Driver", &state->driver_type) < 0) return -1;
    if (add_type(module, &kernel_type_spec, "Kernel", &state->kernel_type) < 0) return -1;
    if (add_type(module, &tensor_map_type_spec, "TensorMap", &state->tensor_map_type) < 0) return -1;
    if (add_type(module, &binary_type_spec, "Binary", &state->binary_type) < 0) return -1;
    return add_type(module, &triton_launcher_type_spec, "TritonLauncher", &state->triton_launcher_type);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
    ModuleState *state = state_of(module);
    Py_VISIT(state->driver_type);
    Py_VISIT(state->kernel_type);
    Py_VISIT(state->tensor_map_type);
    Py_VISIT(state->binary_type);
    Py_VISIT(state->triton_launcher_type);
    for (int i = 0; i < TENSOR_TYPES; i++) Py_VISIT(state->tensor_types[i]);
    return 0;
}

static int module_clear(PyObject *module) {
    ModuleState *state = state_of(module);
    Py_CLEAR(state->driver_type);
    Py_CLEAR(state->kernel_type);
    Py_CLEAR(state->tensor_map_type);
    Py_CLEAR(state->binary_type);
    Py_CLEAR(state->triton_launcher_type);
    for (int i = 0; i < TENSOR_TYPES; i++) Py_CLEAR(state->tensor_types[i]);
    PyObject **const names[] = {&state->is_neg, &state->requires_grad, &state->data_ptr, &state->dtype, &state->base,
                                &state->shape,  &state->strides,       &state->padding,  &state->tf32,  &state->calls};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) Py_CLEAR(*names[i]);
    return 0;
}

static void module_free(void *module) { (void)module_clear(module); }

PyDoc_STRVAR(tensor_rows_doc,
             "tensor_rows($module, tensor, /)\n--\n\n"
             "A tensor as rows of contiguous elements, read through torch's DLPack exchange API:\n"
             "(address, device_type, device_index, dtype_code, dtype_bits, rows, columns, row_stride).\n"
             "None where it is not such a tensor, or torch (before 2.10) has no such API.");

PyDoc_STRVAR(traits_doc,
             "traits($module, tensors, settings=(), known=(), /)\n--\n\n"
             "Of a tuple of tensors and Nones, added up: 1 one of them requires a gradient, 2 settings are not the very\n"
             "objects of known; or 4 alone: one has something that only torch's dispatcher sees, or is no tensor.\n"
             "4 for all tensors where torch (before 2.10) has no DLPack exchange API.");

PyDoc_STRVAR(layouts_doc,
             "layouts($module, tensors, /)\n--\n\n"
             "(key, *addresses) of a tuple of tensors and Nones: equal keys, equal devices, dtypes, sizes, strides.\n"
             "None where one is no plain tensor with memory of its own, or torch (before 2.10) has no exchange API.");

static PyMethodDef module_methods[] = {
    {"tensor_rows", tensor_rows, METH_O, tensor_rows_doc},
    {"traits", (PyCFunction)(void (*)(void))traits, METH_FASTCALL, traits_doc},
    {"layouts", layouts, METH_O, layouts_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_execute},
    {0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "liger_aot._launch",
    .m_doc = "Loads ahead-of-time compiled kernels into a CUDA or HIP driver and launches them.",
    .m_size = sizeof(ModuleState),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__launch(void) { return PyModuleDef_Init(&module_definition); }
