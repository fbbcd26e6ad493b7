//! Functions that torch's libraries need at load time but nothing here simulates: parts of
//! cuSPARSE, cuDNN, NCCL and others, and driver calls unrelated to memory or order.
//!
//! Each returns its library's "not supported", is counted in the books, and names itself on stderr
//! at its first call.

use crate::abi::{Counter, Out};
use std::ffi::c_char;

fn refuse(calls: &'static Counter, name: &str, status: u64) -> u64 {
    if calls.hit() && std::env::var_os("PHANTOM_QUIET").is_none() {
        eprintln!(
            "the stand-in GPU: {name} is not simulated; it answers \"not supported\" ({status})"
        );
    }
    status
}

macro_rules! unsupported {
    ($status:literal => $($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> u64 {
            static CALLS: Counter = Counter::new(stringify!($name));
            refuse(&CALLS, stringify!($name), $status)
        }
    )*};
}

/// Functions that return a string.
macro_rules! texts {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> *const c_char {
            c"not supported by the stand-in GPU".as_ptr()
        }
    )*};
}

/// Functions that return a version through their first argument.
macro_rules! versions {
    ($($name:ident = $version:literal)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(out: Out<i32>) -> u32 {
            out.put_if_wanted($version);
            0
        }
    )*};
}

texts! {
    cudnnGetErrorString cusparseGetErrorString ncclGetErrorString ncclGetLastError
    nvrtcGetErrorString
}

versions! {
    ncclGetVersion = 22809
    cuptiGetVersion = 130000
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnGetLastErrorString(text: Out<u8>, length: usize) {
    // An empty buffer gets nothing.
    let _ = crate::properties::put_text(
        text,
        i32::try_from(length).unwrap_or(i32::MAX),
        "not supported by the stand-in GPU",
    );
}

/// Writes a string through its second argument.
#[unsafe(no_mangle)]
pub extern "C" fn cuptiGetResultString(_result: u32, out: Out<*const c_char>) -> u32 {
    out.put(c"not supported by the stand-in GPU".as_ptr()).err().unwrap_or(0)
}

/// 0: NVSHMEM is not initialised.
#[unsafe(no_mangle)]
pub extern "C" fn nvshmemid_init_status() -> u32 {
    0
}

unsupported! { 3000 =>
    cudnnCTCLoss cudnnCTCLoss_v8 cudnnCreateCTCLossDescriptor cudnnCreatePoolingDescriptor
    cudnnDestroyCTCLossDescriptor cudnnGetCTCLossWorkspaceSize cudnnGetCTCLossWorkspaceSize_v8
    cudnnGetFilterNdDescriptor cudnnPoolingForward cudnnSetCTCLossDescriptorEx
    cudnnSetCTCLossDescriptor_v9 cudnnSetPooling2dDescriptor
}

unsupported! { 10 =>
    cusparseCbsrsm2_analysis cusparseCbsrsm2_bufferSize cusparseCbsrsm2_solve
    cusparseCbsrsv2_analysis cusparseCbsrsv2_bufferSize cusparseCbsrsv2_solve cusparseCcsrgeam2
    cusparseCcsrgeam2_bufferSizeExt cusparseCreateBsrsm2Info cusparseCreateBsrsv2Info
    cusparseDbsrsm2_analysis cusparseDbsrsm2_bufferSize cusparseDbsrsm2_solve
    cusparseDbsrsv2_analysis cusparseDbsrsv2_bufferSize cusparseDbsrsv2_solve cusparseDcsrgeam2
    cusparseDcsrgeam2_bufferSizeExt cusparseDestroyBsrsm2Info cusparseDestroyBsrsv2Info
    cusparseLtDenseDescriptorInit cusparseLtInit cusparseLtMatDescriptorDestroy cusparseLtMatmul
    cusparseLtMatmulAlgGetAttribute cusparseLtMatmulAlgSelectionInit
    cusparseLtMatmulAlgSetAttribute cusparseLtMatmulDescSetAttribute cusparseLtMatmulDescriptorInit
    cusparseLtMatmulGetWorkspace cusparseLtMatmulPlanDestroy cusparseLtMatmulPlanInit
    cusparseLtMatmulSearch cusparseLtSpMMACompress2 cusparseLtSpMMACompressedSize2
    cusparseLtStructuredDescriptorInit cusparseSbsrsm2_analysis cusparseSbsrsm2_bufferSize
    cusparseSbsrsm2_solve cusparseSbsrsv2_analysis cusparseSbsrsv2_bufferSize cusparseSbsrsv2_solve
    cusparseScsrgeam2 cusparseScsrgeam2_bufferSizeExt cusparseSpGEMM_compute cusparseSpGEMM_copy
    cusparseSpGEMM_createDescr cusparseSpGEMM_destroyDescr cusparseSpGEMM_workEstimation
    cusparseSpMatGetSize cusparseXbsrsm2_zeroPivot cusparseXbsrsv2_zeroPivot cusparseXcsrgeam2Nnz
    cusparseZbsrsm2_analysis cusparseZbsrsm2_bufferSize cusparseZbsrsm2_solve
    cusparseZbsrsv2_analysis cusparseZbsrsv2_bufferSize cusparseZbsrsv2_solve cusparseZcsrgeam2
    cusparseZcsrgeam2_bufferSizeExt
}

unsupported! { 15 =>
    cublasLtMatmulAlgoCheck cublasLtMatmulAlgoConfigGetAttribute
    cublasLtMatmulAlgoConfigSetAttribute cublasLtMatmulAlgoInit
}

unsupported! { 5030 =>
    cuFileBufDeregister cuFileBufRegister cuFileHandleDeregister cuFileHandleRegister cuFileRead
    cuFileWrite
}

unsupported! { 27 =>
    cuptiActivityDisable cuptiActivityEnable cuptiActivityEnableCudaEventDeviceTimestamps
    cuptiActivityEnableDriverApi cuptiActivityEnableRuntimeApi cuptiActivityFlushAll
    cuptiActivityGetNextRecord cuptiActivityGetNumDroppedRecords
    cuptiActivityPopExternalCorrelationId cuptiActivityPushExternalCorrelationId
    cuptiActivityRegisterCallbacks cuptiActivityRegisterTimestampCallback cuptiActivitySetAttribute
    cuptiEnableCallback cuptiEnableDomain cuptiEventGetAttribute cuptiEventGetIdFromName
    cuptiEventGroupGetAttribute cuptiEventGroupReadEvent cuptiEventGroupSetAttribute
    cuptiEventGroupSetDisable cuptiEventGroupSetEnable cuptiEventGroupSetsCreate
    cuptiEventGroupSetsDestroy cuptiFinalize cuptiGetCallbackName cuptiGetDeviceId
    cuptiMetricEnumEvents cuptiMetricGetAttribute cuptiMetricGetIdFromName cuptiMetricGetNumEvents
    cuptiMetricGetValue cuptiSetEventCollectionMode cuptiSubscribe cuptiUnsubscribe
}

unsupported! { 5 =>
    ncclCommGetUniqueId ncclCommGrow ncclCommMemStats ncclCommResume ncclCommRevoke ncclCommShrink
    ncclCommSuspend ncclCommWindowDeregister ncclCommWindowRegister ncclDevCommCreate
    ncclDevCommDestroy ncclGather ncclGetLsaMultimemDevicePointer ncclGetPeerDevicePointer
    ncclGroupSimulateEnd ncclPutSignal ncclSignal ncclWaitSignal ncclWinGetUserPtr
}

unsupported! { 7 =>
    nvshmem_barrier_all nvshmem_free nvshmem_info_get_version nvshmem_init nvshmem_malloc
    nvshmem_ptr nvshmem_selected_device_transport nvshmem_team_n_pes nvshmem_team_split_strided
    nvshmemid_hostlib_finalize nvshmemid_hostlib_init_attr nvshmemx_alltoallmem_on_stream
    nvshmemx_broadcastmem_on_stream nvshmemx_cumodule_init nvshmemx_get_uniqueid
    nvshmemx_getmem_on_stream nvshmemx_mc_ptr nvshmemx_putmem_on_stream
    nvshmemx_putmem_signal_on_stream nvshmemx_set_attr_uniqueid_args
    nvshmemx_signal_wait_until_on_stream
}

// Driver calls that cudarc 0.19 or torch may look up and that are not simulated.
unsupported! { 801 =>
    cuArray3DCreate_v2 cuArray3DGetDescriptor_v2 cuArrayCreate_v2 cuArrayDestroy
    cuArrayGetDescriptor_v2
    cuArrayGetMemoryRequirements cuArrayGetPlane cuArrayGetSparseProperties
    cuCoredumpDeregisterCompleteCallback cuCoredumpDeregisterStartCallback cuCoredumpGetAttribute
    cuCoredumpGetAttributeGlobal cuCoredumpRegisterCompleteCallback cuCoredumpRegisterStartCallback
    cuCoredumpSetAttribute cuCoredumpSetAttributeGlobal cuCtxAttach cuCtxDetach cuCtxFromGreenCtx
    cuCtxGetCacheConfig cuCtxGetDevResource cuCtxGetExecAffinity cuCtxGetSharedMemConfig
    cuCtxResetPersistingL2Cache cuCtxSetCacheConfig cuCtxSetFlags cuCtxSetSharedMemConfig
    cuCtxWaitEvent
    cuDestroyExternalMemory cuDestroyExternalSemaphore cuDevResourceGenerateDesc
    cuDevSmResourceSplit
    cuDevSmResourceSplitByCount cuDeviceGetByPCIBusId cuDeviceGetCliqueCount cuDeviceGetCliqueInfo
    cuDeviceGetDevResource cuDeviceGetExecAffinitySupport cuDeviceGetFabricClusterUuid
    cuDeviceGetGraphMemAttribute cuDeviceGetHostAtomicCapabilities cuDeviceGetLuid
    cuDeviceGetP2PAtomicCapabilities cuDeviceGetProperties cuDeviceGetTexture1DLinearMaxWidth
    cuDeviceGraphMemTrim cuDeviceRegisterAsyncNotification cuDeviceSetGraphMemAttribute
    cuDeviceUnregisterAsyncNotification cuExternalMemoryGetMappedBuffer
    cuExternalMemoryGetMappedMipmappedArray cuFlushGPUDirectRDMAWrites cuFuncGetModule cuFuncGetName
    cuFuncGetParamCount cuFuncGetParamInfo cuFuncIsLoaded cuFuncLoad cuFuncSetBlockShape
    cuFuncSetSharedMemConfig cuFuncSetSharedSize cuGetExportTable cuGraphAddBatchMemOpNode
    cuGraphAddChildGraphNode cuGraphAddDependencies cuGraphAddDependencies_v2 cuGraphAddEmptyNode
    cuGraphAddEventRecordNode cuGraphAddEventWaitNode cuGraphAddExternalSemaphoresSignalNode
    cuGraphAddExternalSemaphoresWaitNode cuGraphAddHostNode cuGraphAddKernelNode
    cuGraphAddKernelNode_v2
    cuGraphAddMemAllocNode cuGraphAddMemFreeNode cuGraphAddMemcpyNode cuGraphAddMemsetNode
    cuGraphAddNode
    cuGraphAddNode_v2 cuGraphAddNode_v3 cuGraphBatchMemOpNodeGetParams
    cuGraphBatchMemOpNodeSetParams
    cuGraphChildGraphNodeGetGraph cuGraphClone cuGraphConditionalHandleCreate
    cuGraphDebugDotPrint cuGraphDestroyNode cuGraphEventRecordNodeGetEvent
    cuGraphEventRecordNodeSetEvent
    cuGraphEventWaitNodeGetEvent cuGraphEventWaitNodeSetEvent cuGraphExecBatchMemOpNodeSetParams
    cuGraphExecChildGraphNodeSetParams cuGraphExecEventRecordNodeSetEvent
    cuGraphExecEventWaitNodeSetEvent
    cuGraphExecExternalSemaphoresSignalNodeSetParams cuGraphExecExternalSemaphoresWaitNodeSetParams
    cuGraphExecGetFlags cuGraphExecGetId cuGraphExecHostNodeSetParams cuGraphExecKernelNodeSetParams
    cuGraphExecKernelNodeSetParams_v2 cuGraphExecMemcpyNodeSetParams cuGraphExecMemsetNodeSetParams
    cuGraphExecNodeSetParams cuGraphExecUpdate cuGraphExecUpdate_v2
    cuGraphExternalSemaphoresSignalNodeGetParams cuGraphExternalSemaphoresSignalNodeSetParams
    cuGraphExternalSemaphoresWaitNodeGetParams cuGraphExternalSemaphoresWaitNodeSetParams
    cuGraphGetEdges
    cuGraphGetEdges_v2 cuGraphGetId cuGraphGetNodes cuGraphGetRootNodes cuGraphHostNodeGetParams
    cuGraphHostNodeSetParams cuGraphInstantiateWithParams cuGraphInstantiate_v2
    cuGraphKernelNodeCopyAttributes cuGraphKernelNodeGetAttribute cuGraphKernelNodeGetParams
    cuGraphKernelNodeGetParams_v2 cuGraphKernelNodeSetAttribute cuGraphKernelNodeSetParams
    cuGraphKernelNodeSetParams_v2 cuGraphMemAllocNodeGetParams cuGraphMemFreeNodeGetParams
    cuGraphMemcpyNodeGetParams cuGraphMemcpyNodeSetParams cuGraphMemsetNodeGetParams
    cuGraphMemsetNodeSetParams cuGraphNodeFindInClone cuGraphNodeGetContainingGraph
    cuGraphNodeGetDependencies cuGraphNodeGetDependencies_v2 cuGraphNodeGetDependentNodes
    cuGraphNodeGetDependentNodes_v2 cuGraphNodeGetEnabled cuGraphNodeGetLocalId cuGraphNodeGetParams
    cuGraphNodeGetToolsId cuGraphNodeGetType cuGraphNodeSetEnabled cuGraphNodeSetParams
    cuGraphNodeSetParams_v2 cuGraphReleaseUserObject cuGraphRemoveDependencies
    cuGraphRemoveDependencies_v2 cuGraphRetainUserObject cuGraphUpload cuGraphicsMapResources
    cuGraphicsResourceGetMappedMipmappedArray cuGraphicsResourceGetMappedPointer_v2
    cuGraphicsResourceSetMapFlags_v2 cuGraphicsSubResourceGetMappedArray cuGraphicsUnmapResources
    cuGraphicsUnregisterResource cuGreenCtxCreate cuGreenCtxDestroy cuGreenCtxGetDevResource
    cuGreenCtxGetId cuGreenCtxRecordEvent cuGreenCtxStreamCreate cuGreenCtxWaitEvent
    cuImportExternalMemory cuImportExternalSemaphore cuKernelGetAttribute cuKernelGetFunction
    cuKernelGetLibrary cuKernelGetName cuKernelGetParamCount cuKernelGetParamInfo
    cuKernelSetAttribute
    cuKernelSetCacheConfig cuLaunch cuLaunchCooperativeKernelMultiDevice cuLaunchGrid
    cuLaunchGridAsync
    cuLaunchHostFunc_v2 cuLibraryEnumerateKernels cuLibraryGetGlobal cuLibraryGetKernel
    cuLibraryGetKernelCount cuLibraryGetManaged cuLibraryGetModule cuLibraryGetUnifiedFunction
    cuLibraryLoadData cuLibraryLoadFromFile cuLibraryUnload cuLinkAddData_v2 cuLinkAddFile_v2
    cuLinkComplete cuLinkCreate_v2 cuLinkDestroy cuLogicalEndpointAddDevice
    cuLogicalEndpointBindAddr
    cuLogicalEndpointBindMem cuLogicalEndpointCreate cuLogicalEndpointDestroy
    cuLogicalEndpointExport
    cuLogicalEndpointGetLimits cuLogicalEndpointIdRelease cuLogicalEndpointIdReserve
    cuLogicalEndpointImport cuLogicalEndpointQuery cuLogicalEndpointUnbind cuLogsCurrent
    cuLogsDumpToFile
    cuLogsDumpToMemory
    cuMemBatchDecompressAsync cuMemDiscardAndPrefetchBatchAsync
    cuMemDiscardBatchAsync
    cuMemGetAllocationPropertiesFromHandle cuMemRetainAllocationHandle cuMemGetDefaultMemPool
    cuMemGetHandleForAddressRange cuMemGetLocationInfo cuMemGetMemPool
    cuMemMapArrayAsync cuMemPoolExportPointer
    cuMemPoolExportToShareableHandle cuMemPoolGetAccess cuMemPoolImportFromShareableHandle
    cuMemPoolImportPointer cuMemPrefetchBatchAsync
    cuMemRangeGetAttribute cuMemRangeGetAttributes cuMemSetMemPool
    cuMemcpy2DAsync_v2 cuMemcpy2DUnaligned_v2 cuMemcpy2D_v2 cuMemcpy3DAsync_v2 cuMemcpy3DBatchAsync
    cuMemcpy3DBatchAsync_v2 cuMemcpy3DPeer cuMemcpy3DPeerAsync cuMemcpy3DWithAttributesAsync
    cuMemcpy3D_v2
    cuMemcpyAtoA_v2 cuMemcpyAtoD_v2 cuMemcpyAtoHAsync_v2 cuMemcpyAtoH_v2 cuMemcpyBatchAsync
    cuMemcpyBatchAsync_v2 cuMemcpyDtoA_v2 cuMemcpyHtoAAsync_v2 cuMemcpyHtoA_v2
    cuMemcpyWithAttributesAsync
    cuMemsetD2D16Async cuMemsetD2D16_v2 cuMemsetD2D32Async cuMemsetD2D32_v2 cuMemsetD2D8Async
    cuMemsetD2D8_v2 cuMipmappedArrayCreate cuMipmappedArrayDestroy cuMipmappedArrayGetLevel
    cuMipmappedArrayGetMemoryRequirements cuMipmappedArrayGetSparseProperties
    cuModuleEnumerateFunctions
    cuModuleGetFunctionCount cuModuleGetLoadingMode cuModuleGetSurfRef cuModuleGetTexRef
    cuModuleLoadFatBinary cuMulticastAddDevice cuMulticastBindAddr cuMulticastBindAddr_v2
    cuMulticastBindMem cuMulticastBindMem_v2 cuMulticastCreate cuMulticastGetGranularity
    cuMulticastUnbind
    cuOccupancyAvailableDynamicSMemPerBlock cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags
    cuOccupancyMaxActiveClusters cuOccupancyMaxPotentialBlockSize
    cuOccupancyMaxPotentialBlockSizeWithFlags cuOccupancyMaxPotentialClusterSize cuParamSetSize
    cuParamSetTexRef cuParamSetf cuParamSeti cuParamSetv cuProfilerInitialize cuProfilerStart
    cuProfilerStop cuSignalExternalSemaphoresAsync cuStreamAttachMemAsync cuStreamBatchMemOp
    cuStreamBatchMemOp_v2 cuStreamBeginCaptureToCig
    cuStreamBeginRecaptureToGraph cuStreamCopyAttributes cuStreamEndCaptureToCig
    cuStreamGetAttribute
    cuStreamGetCtx_v2 cuStreamGetDevResource cuStreamGetGreenCtx cuStreamSetAttribute
    cuStreamUpdateCaptureDependencies cuStreamUpdateCaptureDependencies_v2 cuStreamWaitValue32
    cuStreamWaitValue32_v2 cuStreamWaitValue64 cuStreamWaitValue64_v2 cuStreamWriteValue32
    cuStreamWriteValue64 cuSurfObjectCreate cuSurfObjectDestroy cuSurfObjectGetResourceDesc
    cuSurfRefGetArray cuSurfRefSetArray cuTensorMapEncodeIm2col cuTensorMapEncodeIm2colWide
    cuTensorMapReplaceAddress cuTexObjectCreate cuTexObjectDestroy
    cuTexObjectGetResourceDesc cuTexObjectGetResourceViewDesc cuTexObjectGetTextureDesc
    cuTexRefCreate
    cuTexRefDestroy cuTexRefGetAddressMode cuTexRefGetAddress_v2 cuTexRefGetArray
    cuTexRefGetBorderColor
    cuTexRefGetFilterMode cuTexRefGetFlags cuTexRefGetFormat cuTexRefGetMaxAnisotropy
    cuTexRefGetMipmapFilterMode cuTexRefGetMipmapLevelBias cuTexRefGetMipmapLevelClamp
    cuTexRefGetMipmappedArray cuTexRefSetAddress2D_v3 cuTexRefSetAddressMode cuTexRefSetAddress_v2
    cuTexRefSetArray cuTexRefSetBorderColor cuTexRefSetFilterMode cuTexRefSetFlags cuTexRefSetFormat
    cuTexRefSetMaxAnisotropy cuTexRefSetMipmapFilterMode cuTexRefSetMipmapLevelBias
    cuTexRefSetMipmapLevelClamp cuTexRefSetMipmappedArray cuUserObjectCreate cuUserObjectRelease
    cuUserObjectRetain cuWaitExternalSemaphoresAsync
}

// nvJitLink's, which the real cuSPARSE of CUDA 12 is linked to: torch 2.4 loads that by a path of
// its own, whatever LD_LIBRARY_PATH says, and finds nvJitLink here.
unsupported! { 6 =>
    __nvJitLinkAddData_12_1 __nvJitLinkComplete_12_1 __nvJitLinkCreate_12_1
    __nvJitLinkDestroy_12_1 __nvJitLinkGetErrorLogSize_12_1 __nvJitLinkGetErrorLog_12_1
    __nvJitLinkGetLinkedCubinSize_12_1 __nvJitLinkGetLinkedCubin_12_1
    __nvJitLinkAddData_12_4 __nvJitLinkComplete_12_4 __nvJitLinkCreate_12_4
    __nvJitLinkDestroy_12_4 __nvJitLinkGetErrorLogSize_12_4 __nvJitLinkGetErrorLog_12_4
    __nvJitLinkGetLinkedCubinSize_12_4 __nvJitLinkGetLinkedCubin_12_4
}

// Runtime calls that torch or a plain program links and that are not simulated.
unsupported! { 801 =>
    cudaDeviceGetGraphMemAttribute cudaDeviceSetGraphMemAttribute cudaGraphAddNode
    cudaGraphConditionalHandleCreate cudaGraphRetainUserObject cudaKernelSetAttributeForDevice
    cudaLibraryGetGlobal cudaLibraryGetKernel cudaLibraryGetKernelCount cudaLibraryGetManaged
    cudaLibraryGetUnifiedFunction cudaLibraryLoadData cudaLibraryLoadFromFile cudaLibraryUnload
    cudaStreamUpdateCaptureDependencies cudaUserObjectCreate cudaUserObjectRelease
}
