//! cuSOLVER: handles are real, factorisations are empty launches, and none fails.
//!
//! The size of a workspace is known only to cuSOLVER; torch queries and allocates it. Here it is 0,
//! and each query is counted (`unknown_workspaces` in the books).

use crate::abi::Out;
use crate::entry::succeeds;
use crate::handle::{HandlePtr, kernels, objects};
use crate::workspaces::{self, sizes};

/// `CUSOLVER_STATUS_INVALID_VALUE` and `CUSOLVER_STATUS_EXECUTION_FAILED`.
const INVALID_VALUE: u32 = 3;
const EXECUTION_FAILED: u32 = 6;

#[unsafe(no_mangle)]
pub extern "C" fn cusolverDnCreate(out: Out<HandlePtr>) -> u32 {
    HandlePtr::create(out)
}

#[unsafe(no_mangle)]
pub extern "C" fn cusolverDnDestroy(handle: HandlePtr) -> u32 {
    handle.destroy();
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cusolverDnSetStream(handle: HandlePtr, stream: usize) -> u32 {
    handle.set_stream(stream);
    0
}

/// `sizes` for two of them, the device's and the host's.
macro_rules! sizes_of_both {
    ($before:tt => $($name:ident)*) => { $(sizes_of_both! { @one $name $before })* };
    (@one $name:ident ($($before:ident)*)) => {
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(
            $($before: usize,)* device: Out<usize>, host: Out<usize>,
        ) -> u32 {
            workspaces::unknown(workspaces::asked_for(stringify!($name)));
            device.put(0).and_then(|()| host.put(0)).map_or(INVALID_VALUE, |()| 0)
        }
    };
}

sizes! { INVALID_VALUE i32: (_a _b _c) =>
    cusolverDnCgesvd_bufferSize cusolverDnDgesvd_bufferSize cusolverDnSgesvd_bufferSize
    cusolverDnZgesvd_bufferSize
}

sizes! { INVALID_VALUE i32: (_a _b _c _d) =>
    cusolverDnCsytrf_bufferSize cusolverDnDsytrf_bufferSize cusolverDnSsytrf_bufferSize
    cusolverDnZsytrf_bufferSize
}

sizes! { INVALID_VALUE i32: (_a _b _c _d _e) =>
    cusolverDnCgeqrf_bufferSize cusolverDnCgetrf_bufferSize cusolverDnCpotrf_bufferSize
    cusolverDnDgeqrf_bufferSize cusolverDnDgetrf_bufferSize cusolverDnDpotrf_bufferSize
    cusolverDnSgeqrf_bufferSize cusolverDnSgetrf_bufferSize cusolverDnSpotrf_bufferSize
    cusolverDnZgeqrf_bufferSize cusolverDnZgetrf_bufferSize cusolverDnZpotrf_bufferSize
}

sizes! { INVALID_VALUE i32: (_a _b _c _d _e _f _g) =>
    cusolverDnCheevd_bufferSize cusolverDnCheevjBatched_bufferSize cusolverDnCheevj_bufferSize
    cusolverDnCungqr_bufferSize cusolverDnDorgqr_bufferSize cusolverDnDsyevd_bufferSize
    cusolverDnDsyevjBatched_bufferSize cusolverDnDsyevj_bufferSize cusolverDnSorgqr_bufferSize
    cusolverDnSsyevd_bufferSize cusolverDnSsyevjBatched_bufferSize cusolverDnSsyevj_bufferSize
    cusolverDnZheevd_bufferSize cusolverDnZheevjBatched_bufferSize cusolverDnZheevj_bufferSize
    cusolverDnZungqr_bufferSize
}

sizes! { INVALID_VALUE i32: (_a _b _c _d _e _f _g _h _i _j _k) =>
    cusolverDnCgesvdjBatched_bufferSize cusolverDnCunmqr_bufferSize
    cusolverDnDgesvdjBatched_bufferSize cusolverDnDormqr_bufferSize
    cusolverDnSgesvdjBatched_bufferSize cusolverDnSormqr_bufferSize
    cusolverDnZgesvdjBatched_bufferSize cusolverDnZunmqr_bufferSize
}

sizes! { INVALID_VALUE i32: (_a _b _c _d _e _f _g _h _i _j _k _l) =>
    cusolverDnCgesvdj_bufferSize cusolverDnDgesvdj_bufferSize cusolverDnSgesvdj_bufferSize
    cusolverDnZgesvdj_bufferSize
}

sizes! { INVALID_VALUE i32: (_a _b _c _d _e _f _g _h _i _j _k _l _m _n _o _p) =>
    cusolverDnCgesvdaStridedBatched_bufferSize cusolverDnDgesvdaStridedBatched_bufferSize
    cusolverDnSgesvdaStridedBatched_bufferSize cusolverDnZgesvdaStridedBatched_bufferSize
}

sizes_of_both! { (_a _b _c _d _e _f _g _h) =>
    cusolverDnXpotrf_bufferSize
}

sizes_of_both! { (_a _b _c _d _e _f _g _h _i _j) =>
    cusolverDnXgeqrf_bufferSize
}

sizes_of_both! { (_a _b _c _d _e _f _g _h _i _j _k) =>
    cusolverDnXsyevBatched_bufferSize cusolverDnXsyevd_bufferSize cusolverDnXsytrs_bufferSize
}

sizes_of_both! { (_a _b _c _d _e _f _g _h _i _j _k _l _m _n _o _p _q) =>
    cusolverDnXgeev_bufferSize
}

objects! { INVALID_VALUE =>
    cusolverDnCreateGesvdjInfo cusolverDnCreateParams cusolverDnCreateSyevjInfo
}

succeeds! {
    cusolverDnDestroyGesvdjInfo cusolverDnDestroyParams cusolverDnDestroySyevjInfo
    cusolverDnXgesvdjSetMaxSweeps cusolverDnXgesvdjSetSortEig cusolverDnXgesvdjSetTolerance
    cusolverDnXsyevjSetSortEig
}

kernels! { EXECUTION_FAILED =>
    cusolverDnCgeqrf cusolverDnCgesvd cusolverDnCgesvdaStridedBatched cusolverDnCgesvdj
    cusolverDnCgesvdjBatched cusolverDnCgetrf cusolverDnCgetrs cusolverDnCheevd cusolverDnCheevj
    cusolverDnCheevjBatched cusolverDnCpotrf cusolverDnCpotrfBatched cusolverDnCpotrs
    cusolverDnCpotrsBatched cusolverDnCsytrf cusolverDnCungqr cusolverDnCunmqr cusolverDnDgeqrf
    cusolverDnDgesvd cusolverDnDgesvdaStridedBatched cusolverDnDgesvdj cusolverDnDgesvdjBatched
    cusolverDnDgetrf cusolverDnDgetrs cusolverDnDorgqr cusolverDnDormqr cusolverDnDpotrf
    cusolverDnDpotrfBatched cusolverDnDpotrs cusolverDnDpotrsBatched cusolverDnDsyevd
    cusolverDnDsyevj cusolverDnDsyevjBatched cusolverDnDsytrf cusolverDnSgeqrf cusolverDnSgesvd
    cusolverDnSgesvdaStridedBatched cusolverDnSgesvdj cusolverDnSgesvdjBatched cusolverDnSgetrf
    cusolverDnSgetrs cusolverDnSorgqr cusolverDnSormqr cusolverDnSpotrf cusolverDnSpotrfBatched
    cusolverDnSpotrs cusolverDnSpotrsBatched cusolverDnSsyevd cusolverDnSsyevj
    cusolverDnSsyevjBatched cusolverDnSsytrf cusolverDnXgeev cusolverDnXgeqrf cusolverDnXpotrf
    cusolverDnXpotrs cusolverDnXsyevBatched cusolverDnXsyevd cusolverDnXsytrs cusolverDnZgeqrf
    cusolverDnZgesvd cusolverDnZgesvdaStridedBatched cusolverDnZgesvdj cusolverDnZgesvdjBatched
    cusolverDnZgetrf cusolverDnZgetrs cusolverDnZheevd cusolverDnZheevj cusolverDnZheevjBatched
    cusolverDnZpotrf cusolverDnZpotrfBatched cusolverDnZpotrs cusolverDnZpotrsBatched
    cusolverDnZsytrf cusolverDnZungqr cusolverDnZunmqr
}
