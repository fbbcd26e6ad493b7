//! cuBLAS and cuBLASLt: handles are real, products are empty launches.

use crate::abi::{Counter, In, Out};
use crate::blas_workspaces;
use crate::entry::succeeds;
use crate::handle::{HandlePtr, kernels, launched};

/// `cublasStatus_t` of a product whose launch failed.
const EXECUTION_FAILED: u32 = 13;

#[unsafe(no_mangle)]
pub extern "C" fn cublasCreate_v2(out: Out<HandlePtr>) -> u32 {
    HandlePtr::create(out)
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasDestroy_v2(handle: HandlePtr) -> u32 {
    handle.destroy();
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasSetStream_v2(handle: HandlePtr, stream: usize) -> u32 {
    handle.set_stream(stream);
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasSetWorkspace_v2(
    _handle: HandlePtr,
    workspace: usize,
    _bytes: usize,
) -> u32 {
    blas_workspaces::note(workspace);
    0
}

/// `CUBLAS_DEFAULT_MATH`.
#[unsafe(no_mangle)]
pub extern "C" fn cublasGetMathMode(_handle: HandlePtr, mode: Out<u32>) -> u32 {
    mode.put(0).err().unwrap_or(0)
}

/// `CUBLAS_POINTER_MODE_HOST`.
#[unsafe(no_mangle)]
pub extern "C" fn cublasGetPointerMode_v2(_handle: HandlePtr, mode: Out<u32>) -> u32 {
    mode.put(0).err().unwrap_or(0)
}

/// The version of cuBLASLt in CUDA 13.0.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetVersion() -> usize {
    130_002
}

/// A library that multiplies nothing ignores descriptors: one object serves for all.
fn descriptor(out: Out<usize>) -> u32 {
    static OPAQUE: [u64; 64] = [0; 64];
    out.put(OPAQUE.as_ptr() as usize).err().unwrap_or(0)
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulDescCreate(out: Out<usize>) -> u32 {
    descriptor(out)
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulPreferenceCreate(out: Out<usize>) -> u32 {
    descriptor(out)
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatrixLayoutCreate(out: Out<usize>) -> u32 {
    descriptor(out)
}

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Default)]
pub struct HeuristicResult {
    algorithm: [u64; 8],
    workspace: usize,
    state: u32,
    waves: f32,
    reserved: [i32; 4],
}

/// One algorithm, without a workspace.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulAlgoGetHeuristic(
    _handle: HandlePtr,
    _operation: usize,
    _a: usize,
    _b: usize,
    _c: usize,
    _d: usize,
    _preference: usize,
    _wanted: i32,
    results: Out<HeuristicResult>,
    found: Out<i32>,
) -> u32 {
    results.put_if_wanted(HeuristicResult { waves: 1.0, ..HeuristicResult::default() });
    found.put(1).err().unwrap_or(0)
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmul(
    _handle: HandlePtr,
    _operation: usize,
    _alpha: In<u8>,
    _a: usize,
    _a_layout: usize,
    _b: usize,
    _b_layout: usize,
    _beta: In<u8>,
    _c: usize,
    _c_layout: usize,
    _d: usize,
    _d_layout: usize,
    _algorithm: usize,
    workspace: usize,
    _workspace_bytes: usize,
    stream: usize,
) -> u32 {
    static CALLS: Counter = Counter::new("cublasLtMatmul");
    blas_workspaces::note(workspace);
    launched(&CALLS, stream, EXECUTION_FAILED)
}

succeeds! {
    cublasGetMatrixAsync cublasGetVectorAsync cublasLtMatmulDescDestroy
    cublasLtMatmulDescSetAttribute cublasLtMatmulPreferenceDestroy
    cublasLtMatmulPreferenceSetAttribute cublasLtMatrixLayoutDestroy
    cublasLtMatrixLayoutSetAttribute cublasSetMathMode cublasSetMatrixAsync cublasSetPointerMode_v2
    cublasSetSmCountTarget cublasSetVectorAsync
}

kernels! { EXECUTION_FAILED =>
    cublasCaxpy_v2 cublasCcopy_v2 cublasCdotc_v2 cublasCdotu_v2 cublasCgemmBatched
    cublasCgemmStridedBatched cublasCgemm_v2 cublasCgemv_v2 cublasCgerc_v2 cublasCgeru_v2
    cublasCgetrfBatched cublasChemm_v2 cublasChemv_v2 cublasCher2_v2 cublasCher2k_v2 cublasCher_v2
    cublasCherk_v2 cublasCrot_v2 cublasCrotg_v2 cublasCscal_v2 cublasCsrot_v2 cublasCsscal_v2
    cublasCswap_v2 cublasCsymm_v2 cublasCsymv_v2 cublasCsyr2_v2 cublasCsyr2k_v2 cublasCsyr_v2
    cublasCsyrk_v2 cublasCtrmm_v2 cublasCtrmv_v2 cublasCtrsmBatched cublasCtrsm_v2 cublasCtrsv_v2
    cublasDasum_v2 cublasDaxpy_v2 cublasDcopy_v2 cublasDdot_v2 cublasDgemmBatched
    cublasDgemmStridedBatched cublasDgemm_v2 cublasDgemv_v2 cublasDger_v2 cublasDgetrfBatched
    cublasDnrm2_v2 cublasDotEx cublasDrot_v2 cublasDrotg_v2 cublasDrotm_v2 cublasDrotmg_v2
    cublasDscal_v2 cublasDswap_v2 cublasDsymm_v2 cublasDsymv_v2 cublasDsyr2_v2 cublasDsyr2k_v2
    cublasDsyr_v2 cublasDsyrk_v2 cublasDtrmm_v2 cublasDtrmv_v2 cublasDtrsmBatched cublasDtrsm_v2
    cublasDtrsv_v2 cublasDzasum_v2 cublasDznrm2_v2 cublasGemmEx cublasGemmStridedBatchedEx
    cublasIcamax_v2 cublasIcamin_v2 cublasIdamax_v2 cublasIdamin_v2 cublasIsamax_v2 cublasIsamin_v2
    cublasIzamax_v2 cublasIzamin_v2 cublasSasum_v2 cublasSaxpy_v2 cublasScasum_v2 cublasScnrm2_v2
    cublasScopy_v2 cublasSdot_v2 cublasSgemmBatched cublasSgemmEx cublasSgemmStridedBatched
    cublasSgemm_v2 cublasSgemv_v2 cublasSger_v2 cublasSgetrfBatched cublasSnrm2_v2 cublasSrot_v2
    cublasSrotg_v2 cublasSrotm_v2 cublasSrotmg_v2 cublasSscal_v2 cublasSswap_v2 cublasSsymm_v2
    cublasSsymv_v2 cublasSsyr2_v2 cublasSsyr2k_v2 cublasSsyr_v2 cublasSsyrk_v2 cublasStrmm_v2
    cublasStrmv_v2 cublasStrsmBatched cublasStrsm_v2 cublasStrsv_v2 cublasZaxpy_v2 cublasZcopy_v2
    cublasZdotc_v2 cublasZdotu_v2 cublasZdrot_v2 cublasZdscal_v2 cublasZgemmBatched
    cublasZgemmStridedBatched cublasZgemm_v2 cublasZgemv_v2 cublasZgerc_v2 cublasZgeru_v2
    cublasZgetrfBatched cublasZhemm_v2 cublasZhemv_v2 cublasZher2_v2 cublasZher2k_v2 cublasZher_v2
    cublasZherk_v2 cublasZrot_v2 cublasZrotg_v2 cublasZscal_v2 cublasZswap_v2 cublasZsymm_v2
    cublasZsymv_v2 cublasZsyr2_v2 cublasZsyr2k_v2 cublasZsyr_v2 cublasZsyrk_v2 cublasZtrmm_v2
    cublasZtrmv_v2 cublasZtrsmBatched cublasZtrsm_v2 cublasZtrsv_v2
}

/// Exports functions that launch one kernel and report valid arguments on the host, through the
/// argument behind the named ones.
macro_rules! checked_kernels {
    ($before:tt => $($name:ident)*) => { $(checked_kernels! { @one $name $before })* };
    (@one $name:ident ($($before:ident)*)) => {
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(
            handle: HandlePtr, $($before: usize,)* info: Out<i32>,
        ) -> u32 {
            static CALLS: Counter = Counter::new(stringify!($name));
            info.put_if_wanted(0);
            launched(&CALLS, handle.stream(), EXECUTION_FAILED)
        }
    };
}

checked_kernels! { (_m _n _a _lda _tau) =>
    cublasCgeqrfBatched cublasDgeqrfBatched cublasSgeqrfBatched cublasZgeqrfBatched
}

checked_kernels! { (_transposed _n _columns _a _lda _pivots _b _ldb) =>
    cublasCgetrsBatched cublasDgetrsBatched cublasSgetrsBatched cublasZgetrsBatched
}

checked_kernels! { (_transposed _m _n _columns _a _lda _c _ldc) =>
    cublasCgelsBatched cublasDgelsBatched cublasSgelsBatched cublasZgelsBatched
}
