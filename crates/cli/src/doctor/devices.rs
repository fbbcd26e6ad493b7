//! The driver, NVML, and the memory of each device by holder.
//!
//! Calls the driver through the library's own layer, so the findings match what a program will
//! meet. Driver and NVML run in processes of their own ([`super::probe`]). Reading free memory from
//! the driver makes a context on each device for a moment; NVML needs none and comes first.
#![deny(unsafe_code, clippy::unwrap_used)]

use std::collections::HashMap;
use std::process::Command;
use std::time::Duration;

use gruyere::driver::Driver as _;
use gruyere::driver::cuda::{CudaDriver, is_stand_in};
use gruyere::heap::pages_fit;
use gruyere_record::size::BinaryBytes;
use gruyere_record::sweep::{Found, State};
use gruyere_record::{DeviceGauge, facts};
use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use serde::{Deserialize, Serialize};

use super::finding::Findings;
use super::probe::{Silence, ask};
use crate::device_uuid::uuid_text;

/// A question that is asked in a process of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Probe {
    /// The driver, without a context.
    Driver,
    /// The driver, with free memory.
    DriverMemory,
    /// NVML.
    Nvml,
}

/// Facts from the driver.
#[derive(Debug, Serialize, Deserialize)]
pub struct DriverFacts {
    library: String,
    /// Whether the driver is the stand-in GPU.
    stand_in: bool,
    /// The CUDA version, 12020 for 12.2.
    pub version: i32,
    devices: Vec<DeviceSays>,
}

impl DriverFacts {
    /// Whether there is a device at all.
    pub fn has_a_device(&self) -> bool {
        !self.devices.is_empty()
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct DeviceSays {
    name: String,
    uuid: String,
    total_bytes: u64,
    free_bytes: Option<u64>,
    compute_capability: (u32, u32),
    vmm: bool,
    granularity_bytes: u64,
    pools: bool,
    stream_ids: bool,
    gpu_direct_rdma: bool,
    pages_as_files: bool,
    pool_handle_types: u32,
    trouble: Option<String>,
}

/// Facts from NVML.
#[derive(Debug, Serialize, Deserialize)]
pub struct NvmlFacts {
    driver: String,
    devices: Vec<NvmlDevice>,
}

#[derive(Debug, Serialize, Deserialize)]
struct NvmlDevice {
    name: String,
    uuid: String,
    total_bytes: u64,
    free_bytes: u64,
    compute_mode: Option<String>,
    mig: bool,
    /// Pids (of the host's namespace) and bytes, where NVML reports them.
    processes: Vec<(u32, Option<u64>)>,
}

/// Runs a probe, in its own process.
///
/// # Errors
/// The probe's failure, in words.
pub fn answer(probe: Probe) -> Result<String, String> {
    let value = match probe {
        Probe::Driver => serde_json::to_string(&driver(false)?),
        Probe::DriverMemory => serde_json::to_string(&driver(true)?),
        Probe::Nvml => serde_json::to_string(&nvml()?),
    };
    value.map_err(|error| error.to_string())
}

fn driver(memory: bool) -> Result<DriverFacts, String> {
    let driver = CudaDriver::load().map_err(|error| error.to_string())?;
    let count = driver.device_count().map_err(|error| error.to_string())?;
    let devices = (0..count)
        .map(|id| {
            let handles = driver.handle_types(id).ok();
            let free = memory.then(|| driver.memory_info(id));
            let mut says = DeviceSays {
                name: String::new(),
                uuid: String::new(),
                total_bytes: 0,
                free_bytes: None,
                compute_capability: (0, 0),
                vmm: false,
                granularity_bytes: 0,
                pools: false,
                stream_ids: false,
                gpu_direct_rdma: false,
                pages_as_files: handles.is_some_and(|types| types.pages_as_files),
                pool_handle_types: handles.map_or(0, |types| types.pools),
                trouble: None,
            };
            match driver.capabilities(id) {
                Ok(can) => {
                    says = DeviceSays {
                        name: can.name,
                        uuid: uuid_text(&can.uuid),
                        total_bytes: can.total_memory,
                        compute_capability: can.compute_capability,
                        vmm: can.vmm,
                        granularity_bytes: can.granularity,
                        pools: can.pools,
                        stream_ids: can.stream_ids,
                        gpu_direct_rdma: can.gpu_direct_rdma,
                        ..says
                    }
                }
                Err(error) => says.trouble = Some(error.to_string()),
            }
            match free {
                Some(Ok(info)) => says.free_bytes = Some(info.free),
                Some(Err(error)) => says.trouble = Some(error.to_string()),
                None => {}
            }
            says
        })
        .collect();
    Ok(DriverFacts {
        library: driver.library_path().display().to_string(),
        stand_in: is_stand_in(),
        version: driver.version(),
        devices,
    })
}

fn nvml() -> Result<NvmlFacts, String> {
    // Distributions without the -dev package have only the versioned name.
    let library = std::ffi::OsStr::new("libnvidia-ml.so.1");
    let nvml = Nvml::builder().lib_path(library).init().map_err(|error| error.to_string())?;
    let count = nvml.device_count().map_err(|error| error.to_string())?;
    let mut devices = Vec::new();
    for index in 0..count {
        // A device that fell off the bus must not hide the others.
        let Ok(device) = nvml.device_by_index(index) else { continue };
        let Ok(memory) = device.memory_info() else { continue };
        let compute = device.running_compute_processes().unwrap_or_default();
        let graphics = device.running_graphics_processes().unwrap_or_default();
        let mut processes: Vec<(u32, Option<u64>)> = compute
            .into_iter()
            .chain(graphics)
            .map(|process| match process.used_gpu_memory {
                UsedGpuMemory::Used(bytes) => (process.pid, Some(bytes)),
                UsedGpuMemory::Unavailable => (process.pid, None),
            })
            .collect();
        processes.sort_unstable();
        processes.dedup_by_key(|process| process.0);
        devices.push(NvmlDevice {
            name: device.name().unwrap_or_default(),
            uuid: device.uuid().unwrap_or_default(),
            total_bytes: memory.total,
            free_bytes: memory.free,
            compute_mode: device.compute_mode().ok().map(|mode| format!("{mode:?}")),
            mig: device.mig_mode().is_ok_and(|mode| mode.current == 1),
            processes,
        });
    }
    Ok(NvmlFacts { driver: nvml.sys_driver_version().unwrap_or_default(), devices })
}

/// Runs a probe in a child of this program.
fn asked<T: serde::de::DeserializeOwned>(probe: &str, limit: Duration) -> Result<T, Silence> {
    // The file may have been replaced since the start; /proc/self/exe is the running program.
    let text = ask(Command::new("/proc/self/exe").args(["doctor", "--probe", probe]), limit)
        .map_err(|silence| {
            match silence {
                // The child's words, without the prefix of a command's error.
                Silence::Died(how) => Silence::Died(
                    how.rsplit_once("gruyere doctor: ")
                        .map_or(how.clone(), |(_, words)| words.to_owned()),
                ),
                other => other,
            }
        })?;
    serde_json::from_str(&text)
        .map_err(|error| Silence::Died(format!("an invalid answer: {error}")))
}

/// Facts about the devices.
pub struct Devices {
    /// The driver's facts, if it works.
    pub driver: Option<DriverFacts>,
    /// NVML's facts, if it is installed.
    pub nvml: Option<NvmlFacts>,
}

/// Examines the driver, the devices, and their memory by holder.
pub fn examine(findings: &mut Findings, records: &[Found], limit: Duration) -> Devices {
    let module = std::fs::read_to_string("/proc/driver/nvidia/version").ok();
    if let Some(line) = module.as_deref().and_then(|text| text.lines().next()) {
        findings.ok(
            "kernel module",
            line.trim_start_matches("NVRM version: ")
                .split_whitespace()
                .collect::<Vec<_>>()
                .join(" "),
        );
    }
    let nvml: Option<NvmlFacts> = match asked::<NvmlFacts>("nvml", limit) {
        Ok(facts) => {
            let (driver, count) = (&facts.driver, facts.devices.len());
            findings.ok("NVML", format!("driver {driver}, {}", devices(count)));
            Some(facts)
        }
        Err(Silence::TooLate(limit)) => {
            findings.problem(
                "NVML",
                format!("no answer within {} s: the driver hangs", limit.as_secs()),
                "see the kernel log (`dmesg | grep -i nvrm`); a GPU that hangs needs a reset or a \
                 reboot",
            );
            None
        }
        Err(silence) => {
            findings.note(
                "NVML",
                format!("not usable here, so other processes are not listed: {silence}"),
            );
            None
        }
    };
    let probe = if nvml.is_some() { "driver" } else { "driver-memory" };
    let driver = match asked::<DriverFacts>(probe, limit) {
        Ok(facts) => {
            let (major, minor) = (facts.version / 1000, facts.version % 1000 / 10);
            let (library, count) = (&facts.library, facts.devices.len());
            findings
                .ok("driver", format!("CUDA {major}.{minor} from {library}, {}", devices(count)));
            if facts.stand_in {
                findings.warning(
                    "driver",
                    "it is the stand-in GPU, which keeps books of memory and computes nothing",
                    NO_STAND_IN,
                );
            }
            if facts.devices.is_empty() {
                findings.problem(
                    "driver",
                    "the driver shows no device",
                    "CUDA_VISIBLE_DEVICES may hide them (unset it, or name one); a container needs \
                     --gpus",
                );
            }
            Some(facts)
        }
        Err(silence) => {
            no_driver(findings, &silence, module.is_some());
            None
        }
    };
    for (number, device) in driver.iter().flat_map(|facts| &facts.devices).enumerate() {
        capabilities(findings, number, device);
    }
    let ours = held_by_records(records);
    for (number, device) in driver.iter().flat_map(|facts| &facts.devices).enumerate() {
        let same =
            nvml.iter().flat_map(|facts| &facts.devices).find(|other| other.uuid == device.uuid);
        memory(
            findings,
            number,
            device,
            same,
            ours.get(device.uuid.as_str()).copied().unwrap_or(0),
            records,
        );
    }
    Devices { driver, nvml }
}

fn devices(count: usize) -> String {
    if count == 1 { "1 device".to_owned() } else { format!("{count} devices") }
}

/// How to get from the stand-in to a real GPU.
const NO_STAND_IN: &str = "for a real GPU: unset LD_PRELOAD LD_LIBRARY_PATH";

fn no_driver(findings: &mut Findings, silence: &Silence, module: bool) {
    let remedy = match silence {
        Silence::TooLate(_) => {
            "the driver hangs: see the kernel log (`dmesg | grep -i nvrm`); a GPU that hangs needs \
             a reset or a reboot"
        }
        // The stand-in has ended the probe's process.
        Silence::Died(how) if how.contains("the stand-in GPU") => NO_STAND_IN,
        _ if module => {
            "the kernel module is loaded, but this system lacks the driver's library: start a \
             container with --gpus all (NVIDIA Container Toolkit); elsewhere install the driver's \
             libcuda, or put its folder in LD_LIBRARY_PATH"
        }
        _ => {
            "on a machine with an NVIDIA GPU, install its driver (nvidia-smi must work); start a \
             container with --gpus all; without a GPU, you can still read records and traces, and \
             try a program: `gruyere dryrun train.py` (will it fit), `gruyere compare --stand-in \
             train.py`, `python -m gruyere --stand-in train.py`"
        }
    };
    findings.problem("driver", silence.to_string(), remedy);
}

fn capabilities(findings: &mut Findings, number: usize, device: &DeviceSays) {
    let DeviceSays { name, uuid, compute_capability: (major, minor), .. } = device;
    findings.ok(
        "device",
        format!("{number}: {name}, {}, sm_{major}{minor}, {uuid}", BinaryBytes(device.total_bytes)),
    );
    if let Some(trouble) = &device.trouble {
        findings.problem(
            "device",
            format!("{number}: {trouble}"),
            "another process may hold it exclusively (compute mode), or it is broken: nvidia-smi \
             -q -d COMPUTE,ECC",
        );
        return;
    }
    match (device.vmm, device.pools) {
        (true, _) if !pages_fit(device.granularity_bytes) => findings.warning(
            "device",
            format!(
                "{number}: virtual memory in units of {}, which do not divide 2 MiB: pages cannot \
                 move",
                BinaryBytes(device.granularity_bytes)
            ),
            "no remedy is known: backing:auto uses the driver's pools, or plain allocations",
        ),
        (true, pools) => {
            let pools = if pools { "memory pools" } else { "no memory pools" };
            let granularity = BinaryBytes(device.granularity_bytes);
            findings.ok(
                "device",
                format!(
                    "{number}: virtual memory in units of {granularity}, {pools}: backing:auto \
                     moves pages"
                ),
            );
        }
        (false, true) => findings.warning(
            "device",
            format!(
                "{number}: no virtual memory management, so pages cannot move; backing:auto uses \
                 the driver's pools"
            ),
            "vGPUs and some containers lack it: use the GPU itself, or a newer driver",
        ),
        (false, false) => findings.warning(
            "device",
            format!(
                "{number}: neither virtual memory management nor memory pools; backing:auto uses \
                 plain allocations"
            ),
            "vGPUs and old drivers lack both: use the GPU itself, or a driver of CUDA 11.4 or \
             newer",
        ),
    }
    if !device.stream_ids {
        findings.note(
            "device",
            format!(
                "{number}: no stream ids (drivers before CUDA 12.0): a new stream with the handle \
                 of a destroyed one counts as the same stream"
            ),
        );
    }
    let mut ways = Vec::new();
    if device.pages_as_files {
        ways.push("pages as file descriptors");
    }
    for (bit, way) in [(1, "pools as file descriptors"), (8, "pools as fabric handles")] {
        if device.pool_handle_types & bit != 0 {
            ways.push(way);
        }
    }
    if device.gpu_direct_rdma {
        ways.push("GPUDirect RDMA");
    }
    let ways = if ways.is_empty() { "none".to_owned() } else { ways.join(", ") };
    findings.ok(
        "device",
        format!("{number}: ways to share memory: {ways}; CUDA IPC needs backing:fixed"),
    );
}

/// Bytes held by live processes with records, by device UUID.
fn held_by_records(records: &[Found]) -> HashMap<String, u64> {
    let mut held = HashMap::new();
    for found in records.iter().filter(|found| found.state != State::Stale) {
        let Ok(reader) = &found.reader else { continue };
        for device in reader.device_snapshots() {
            let bytes = device.gauge(DeviceGauge::Reserved);
            let sum: &mut u64 = held.entry(uuid_text(&device.facts.uuid)).or_default();
            *sum = sum.saturating_add(bytes);
        }
    }
    held
}

/// Memory by holder: our records, other processes, unaccounted.
fn memory(
    findings: &mut Findings,
    number: usize,
    device: &DeviceSays,
    nvml: Option<&NvmlDevice>,
    ours: u64,
    records: &[Found],
) {
    let total = device.total_bytes;
    let Some(free) = nvml.map(|nvml| nvml.free_bytes).or(device.free_bytes) else { return };
    let used = nvml.map_or(total, |nvml| nvml.total_bytes).max(total).saturating_sub(free);
    let namespace = facts::pid_namespace();
    let known: Vec<u64> = records
        .iter()
        .filter(|found| found.state != State::Stale)
        .filter_map(|found| found.reader.as_ref().ok())
        .map(|reader| reader.process())
        .filter(|process| process.pid_namespace == namespace)
        .map(|process| process.pid)
        .collect();
    let others: Vec<&(u32, Option<u64>)> = nvml
        .iter()
        .flat_map(|nvml| &nvml.processes)
        .filter(|(pid, _)| !known.contains(&u64::from(*pid)))
        .collect();
    let elsewhere = used.saturating_sub(ours);
    let mut text = format!(
        "{number}: {} free of {}; {} held by processes with records, {} by others, contexts and \
         libraries",
        BinaryBytes(free),
        BinaryBytes(total),
        BinaryBytes(ours),
        BinaryBytes(elsewhere)
    );
    for (pid, bytes) in others.iter().take(8) {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let bytes = bytes.map_or("unknown".to_owned(), |bytes| BinaryBytes(bytes).to_string());
        text.push_str(&format!("; pid {pid} {} {bytes}", name.trim()));
    }
    if others.len() > 8 {
        text.push_str(&format!("; and {} more", others.len() - 8));
    }
    // A context takes half a gigabyte; more than a twentieth of a device has another holder.
    if elsewhere > (1 << 30) && elsewhere > total / 20 {
        findings.warning(
            "memory",
            text,
            "memory that other processes hold is not available to yours: end them, or expect to \
             run out of memory earlier (`nvidia-smi` and `gruyere ps` list processes)",
        );
    } else {
        findings.ok("memory", text);
    }
    if let Some(nvml) = nvml {
        match nvml.compute_mode.as_deref() {
            Some("Prohibited") => findings.problem(
                "device",
                format!("{number}: compute mode is prohibited: no CUDA program can use it"),
                "nvidia-smi -c DEFAULT (as root)",
            ),
            Some(mode @ ("ExclusiveProcess" | "ExclusiveThread")) => {
                findings.note(
                    "device",
                    format!("{number}: compute mode {mode}: one process at a time"),
                );
            }
            _ => {}
        }
        if nvml.mig {
            findings.note(
                "device",
                format!(
                    "{number}: MIG is on; instances have their own UUIDs, and NVML does not list \
                     their processes"
                ),
            );
        }
    }
}
