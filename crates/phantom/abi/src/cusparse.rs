//! cuSPARSE: handles are real; products of sparse and dense matrices, triangular solves and sorts
//! are empty launches.
//!
//! Workspaces are as in cuSOLVER (`cusolver.rs`). `unsupported.rs` has the rest: the memory of a
//! sum or product of two sparse matrices depends on the values.

use crate::abi::Out;
use crate::entry::succeeds;
use crate::handle::{HandlePtr, kernels, objects};
use crate::workspaces::sizes;

/// `CUSPARSE_STATUS_INVALID_VALUE` and `CUSPARSE_STATUS_EXECUTION_FAILED`.
const INVALID_VALUE: u32 = 3;
const EXECUTION_FAILED: u32 = 6;

#[unsafe(no_mangle)]
pub extern "C" fn cusparseCreate(out: Out<HandlePtr>) -> u32 {
    HandlePtr::create(out)
}

#[unsafe(no_mangle)]
pub extern "C" fn cusparseDestroy(handle: HandlePtr) -> u32 {
    handle.destroy();
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cusparseSetStream(handle: HandlePtr, stream: usize) -> u32 {
    handle.set_stream(stream);
    0
}

sizes! { INVALID_VALUE usize: (_a _b _c _d _e _f) =>
    cusparseXcoosort_bufferSizeExt cusparseXcsrsort_bufferSizeExt
}

sizes! { INVALID_VALUE usize: (_a _b _c _d _e _f _g _h _i) =>
    cusparseSpMV_bufferSize cusparseSpSV_bufferSize
}

sizes! { INVALID_VALUE usize: (_a _b _c _d _e _f _g _h _i _j) =>
    cusparseSDDMM_bufferSize cusparseSpMM_bufferSize cusparseSpSM_bufferSize
}

objects! { INVALID_VALUE =>
    cusparseCreateCoo cusparseCreateCsr cusparseCreateDnMat cusparseCreateDnVec
    cusparseCreateMatDescr cusparseSpSM_createDescr cusparseSpSV_createDescr
}

succeeds! {
    cusparseCsrSetPointers cusparseCsrSetStridedBatch cusparseDestroyDnMat cusparseDestroyDnVec
    cusparseDestroyMatDescr cusparseDestroySpMat cusparseDnMatSetStridedBatch
    cusparseSetMatDiagType cusparseSetMatFillMode cusparseSetMatIndexBase cusparseSetMatType
    cusparseSetPointerMode cusparseSpMatSetAttribute cusparseSpSM_destroyDescr
    cusparseSpSV_destroyDescr
}

kernels! { EXECUTION_FAILED =>
    cusparseCbsrmm cusparseCbsrmv cusparseCreateIdentityPermutation cusparseDbsrmm cusparseDbsrmv
    cusparseSDDMM cusparseSDDMM_preprocess cusparseSbsrmm cusparseSbsrmv cusparseSpMM cusparseSpMV
    cusparseSpSM_analysis cusparseSpSM_solve cusparseSpSV_analysis cusparseSpSV_solve
    cusparseXcoo2csr cusparseXcoosortByRow cusparseXcsrsort cusparseZbsrmm cusparseZbsrmv
}
