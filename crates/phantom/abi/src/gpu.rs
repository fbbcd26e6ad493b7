//! The simulator behind both libraries, configured by the environment.

use crate::abi::{Answer, code};
use crate::contents::Contents;
use crate::host_memory::{HostMemory, Kind};
use crate::looks::Looks;
use crate::numbers::*;
use crate::sharing::{HandleTypes, Rdma};
use crate::values::Values;
use gruyere_phantom::{
    AddressProvider, CapturingIds, Config, Costs, CountingAddresses, DeviceConfig, GRANULARITY,
    Gpu, PoolAttribute, Prices, SimError, Source,
};
use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering::*};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The simulator, and the state of the C interface.
pub struct Phantom {
    pub sim: Gpu,
    pub host: HostMemory,
    devices: u32,
    /// Each device's default pool, created at first use.
    default_pools: Vec<OnceLock<usize>>,
    /// The pool of each device's `cudaMallocAsync`. 0: the default one.
    current_pools: Vec<AtomicUsize>,
    peers_enabled: Mutex<HashSet<(u32, u32)>>,
    /// The host addresses behind device memory.
    pub window: (u64, u64),
    /// Contents of handles, if kept.
    pub contents: Option<Contents>,
    /// Larger copies and fills are skipped, bytes.
    pub copy_limit: usize,
    /// Values that the host reads in place of kernels' results, if set.
    pub values: Option<Arc<Values>>,
    /// The devices' identity.
    pub looks: Looks,
    /// A kernel's duration, virtual nanoseconds.
    pub kernel: u64,
    /// The kinds of shareable handle.
    pub handle_types: HandleTypes,
    /// Support of RDMA.
    pub rdma: Rdma,
    /// The devices share the host's memory.
    pub integrated: bool,
}

static PHANTOM: OnceLock<Phantom> = OnceLock::new();

/// The simulator.
///
/// # Panics
/// Before `cuInit`; [`crate::entry::entry`] prevents that.
pub fn gpu() -> &'static Phantom {
    PHANTOM.get().expect("initialised by entry()")
}

/// The simulator, if initialised.
pub fn try_gpu() -> Option<&'static Phantom> {
    PHANTOM.get()
}

/// Sets the simulator up. An invalid setting ends the process with a message.
pub fn start() {
    PHANTOM.get_or_init(|| match Phantom::from_environment() {
        Ok(phantom) => phantom,
        Err(what) => {
            eprintln!("phantom: {what}");
            std::process::abort();
        }
    });
}

/// Bytes from "80GiB", "512 MiB", "4096".
pub fn parse_bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number: f64 = text[..digits].parse().ok()?;
    let unit = match text[digits..].trim() {
        "" | "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        "TiB" => 40,
        _ => return None,
    };
    Some((number * (1_u64 << unit) as f64) as u64)
}

fn setting<T>(name: &str, default: T, parse: impl Fn(&str) -> Option<T>) -> Result<T, String> {
    match std::env::var(name) {
        Err(_) => Ok(default),
        Ok(text) => parse(&text).ok_or_else(|| format!("{name}={text}: not understood")),
    }
}

/// A setting in bytes.
fn bytes(name: &str, default: u64) -> Result<u64, String> {
    match std::env::var(name) {
        Err(_) => Ok(default),
        Ok(text) => sized(name, &text),
    }
}

fn sized(name: &str, text: &str) -> Result<u64, String> {
    parse_bytes(text).ok_or_else(|| {
        format!("{name}={text}: not a size; write it as 24GiB, 512MiB, 64KiB or plain bytes")
    })
}

fn switch(text: &str) -> Option<bool> {
    match text {
        "on" => Some(true),
        "off" => Some(false),
        _ => None,
    }
}

/// Real host addresses: one mapping, of which only touched pages exist, divided as plain numbers
/// are.
struct HostAddresses {
    numbers: CountingAddresses,
    /// Added to a number to get an address.
    offset: u64,
    end: u64,
    /// The record of copied values.
    values: Option<Arc<Values>>,
}

/// Address space for all device memory and all reservations: 16 TiB, of which only touched pages
/// cost memory. (Under valgrind a process has much less.)
const WINDOW: u64 = 16 << 40;
/// The window's alignment, if the window is not smaller: above every requested alignment.
const WINDOW_ALIGN: u64 = 4 << 30;

impl HostAddresses {
    fn new(window: u64, values: Option<Arc<Values>>) -> Result<(Self, (u64, u64)), String> {
        let align = WINDOW_ALIGN.min(window.next_power_of_two());
        // SAFETY: a fresh anonymous mapping wherever the kernel likes.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                (window + align) as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(format!(
                "no address space for device memory: {}",
                std::io::Error::last_os_error()
            ));
        }
        let base = (start as u64).next_multiple_of(align);
        // SAFETY: advice on the mapping just made. A core dump would only show zeros.
        unsafe { libc::madvise(start, (window + align) as usize, libc::MADV_DONTDUMP) };
        let mut numbers = CountingAddresses::default();
        let first = numbers.reserve(GRANULARITY, GRANULARITY).ok_or("no numbers for addresses")?;
        if first % align != 0 {
            return Err(format!("the numbers begin at {first:#x}, which is not aligned"));
        }
        // The first granule stays taken: no allocation is just below or at the window's start.
        Ok((
            Self { numbers, offset: base.wrapping_sub(first), end: base + window, values },
            (base, base + window),
        ))
    }
}

impl AddressProvider for HostAddresses {
    fn reserve(&mut self, bytes: u64, align: u64) -> Option<u64> {
        let number = self.numbers.reserve(bytes, align)?;
        let address = number.wrapping_add(self.offset);
        if address + bytes > self.end {
            self.numbers.release(number, bytes);
            return None;
        }
        Some(address)
    }

    fn vacated(&mut self, address: u64, bytes: u64) {
        // SAFETY: the range lies in our window and its owner has given it up; its touched pages go
        // back to the host.
        unsafe { libc::madvise(address as *mut libc::c_void, bytes as usize, libc::MADV_DONTNEED) };
        if let Some(values) = &self.values {
            values.lost(address, bytes);
        }
    }

    fn release(&mut self, address: u64, bytes: u64) {
        self.vacated(address, bytes);
        self.numbers.release(address.wrapping_sub(self.offset), bytes);
    }
}

/// The stream of a `_ptsz` or `_ptds` call: 0 is the calling thread's own.
pub fn own(stream: usize) -> usize {
    if stream == 0 { 2 } else { stream }
}

/// A simulator's error as a code.
pub fn failed(error: SimError) -> u32 {
    error.code
}

impl Phantom {
    fn from_environment() -> Result<Self, String> {
        let devices: u32 = setting("PHANTOM_DEVICES", 1, |text| {
            text.parse().ok().filter(|n| (0..=64).contains(n))
        })?;
        let memory = bytes("PHANTOM_MEMORY", 80 << 30)?;
        let taken = bytes("PHANTOM_TAKEN", 0)?;
        if taken > memory {
            return Err(format!(
                "PHANTOM_TAKEN={taken}: more than the devices have (PHANTOM_MEMORY={memory})"
            ));
        }
        let copy_limit = bytes("PHANTOM_COPY_LIMIT", 64 << 10)?;
        let contents = setting("PHANTOM_CONTENTS", None, |text| match text {
            "handles" => Some(Some(Contents::default())),
            "addresses" => Some(None),
            _ => None,
        })?;
        let values = setting("PHANTOM_VALUES", None, |text| {
            Values::parse(text, copy_limit as usize).map(|values| Some(Arc::new(values)))
        })?;
        if values.is_some() && contents.is_some() {
            return Err("PHANTOM_VALUES makes values up for addresses: it does not go with \
                        PHANTOM_CONTENTS=handles"
                .to_owned());
        }
        let looks = Looks::from_environment()?;
        let kernel = setting("PHANTOM_KERNEL_NS", 0, |text| text.parse().ok())?;
        let prices = std::env::var("PHANTOM_PRICES").ok().filter(|name| !name.is_empty());
        let prices = prices.map(|name| Prices::open(&name)).transpose();
        let prices = prices.map_err(|error| format!("PHANTOM_PRICES: {error}"))?;
        // A price file implies that calls are charged.
        let unsaid = prices.as_ref().map_or(Costs::zero(), |prices| prices.costs);
        let prices = prices.map_or(Costs::default(), |prices| prices.costs);
        let costs = setting("PHANTOM_COSTS", unsaid, |text| match text {
            "none" => Some(Costs::zero()),
            "launches" => Some(Costs { launch: prices.launch, ..Costs::zero() }),
            "calls" => Some(prices),
            _ => None,
        })?;
        let oracle = setting("PHANTOM_ORACLE", false, switch)?;
        let capturing_ids =
            setting("PHANTOM_CAPTURING_IDS", CapturingIds::Told, |text| match text {
                "told" => Some(CapturingIds::Told),
                "refused" => Some(CapturingIds::Refused),
                "invalidate" => Some(CapturingIds::Invalidate),
                _ => None,
            })?;
        let posix = HandleTypes {
            offered: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR as u32,
            refused: false,
        };
        let handle_types = setting("PHANTOM_HANDLE_TYPES", posix, HandleTypes::parse)?;
        let rdma = setting("PHANTOM_RDMA", Rdma::Works, Rdma::parse)?;
        let integrated = setting("PHANTOM_INTEGRATED", false, switch)?;
        let power = |text: &str| parse_bytes(text).filter(|bytes| bytes.is_power_of_two());
        let granularity = setting("PHANTOM_GRANULARITY", GRANULARITY, power)?;
        let default_alignment = setting("PHANTOM_ALIGNMENT", GRANULARITY, power)?;
        let without = setting("PHANTOM_WITHOUT", String::new(), |text| Some(text.to_owned()))?;
        let (mut vmm, mut pools, mut stream_ids, mut context_events) = (true, true, true, true);
        for feature in without.split(',').filter(|feature| !feature.is_empty()) {
            match feature {
                "vmm" => vmm = false,
                "pools" => pools = false,
                "stream_ids" => stream_ids = false,
                "context_events" => context_events = false,
                _ => {
                    return Err(format!(
                        "PHANTOM_WITHOUT={without}: vmm, pools, stream_ids and context_events can \
                         be left out"
                    ));
                }
            }
        }
        let config = Config {
            devices: vec![
                DeviceConfig { vmm, pools, granularity, ..DeviceConfig::new(memory) };
                devices as usize
            ],
            costs,
            stream_ids,
            context_events,
            capturing_ids,
            default_alignment,
            oracle,
            ..Config::new(memory)
        };
        let window = bytes("PHANTOM_WINDOW", WINDOW)?;
        let (addresses, window) = HostAddresses::new(window, values.clone())?;
        let sim = Gpu::with_addresses(config, Box::new(addresses));
        sim.print_faults();
        (0..devices).for_each(|device| sim.set_taken(device, taken));
        Ok(Self {
            sim,
            host: HostMemory::default(),
            devices,
            default_pools: (0..devices).map(|_| OnceLock::new()).collect(),
            current_pools: (0..devices).map(|_| AtomicUsize::new(0)).collect(),
            peers_enabled: Mutex::default(),
            window,
            copy_limit: if contents.is_some() { usize::MAX } else { copy_limit as usize },
            contents,
            values,
            looks,
            kernel,
            handle_types,
            rdma,
            integrated,
        })
    }

    /// The addresses of device memory: the first, and one past the last.
    pub fn window(&self) -> (u64, u64) {
        self.window
    }

    pub fn device_count(&self) -> u32 {
        self.devices
    }

    /// A device's ordinal, checked.
    pub fn device(&self, device: i32) -> Result<u32, u32> {
        u32::try_from(device).ok().filter(|&d| d < self.devices).ok_or(code::INVALID_DEVICE)
    }

    pub fn total_memory(&self, device: u32) -> Result<u64, u32> {
        self.device(device as i32).map(|device| self.sim.books(device).capacity)
    }

    pub fn has_vmm(&self, device: u32) -> bool {
        self.sim.device_config(device).is_ok_and(|config| config.vmm)
    }

    pub fn has_pools(&self, device: u32) -> bool {
        self.sim.device_config(device).is_ok_and(|config| config.pools)
    }

    pub fn memory_info(&self, device: u32) -> Result<(u64, u64), u32> {
        self.sim.memory_info(device).map_err(failed)
    }

    pub fn can_access_peer(&self, device: u32, peer: u32) -> Result<bool, u32> {
        self.sim.can_access_peer(device, peer).map_err(failed)
    }

    pub fn enable_peer(&self, device: u32, peer: u32) -> Answer {
        if device == peer || !self.can_access_peer(device, peer)? {
            return Err(code::INVALID_DEVICE);
        }
        match self
            .peers_enabled
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert((device, peer))
        {
            true => Ok(()),
            false => Err(code::PEER_ACCESS_ALREADY_ENABLED),
        }
    }

    pub fn device_synchronize(&self, device: u32) -> Answer {
        self.sim.device_synchronize(device).map_err(failed)
    }

    /// The default pool of `device`.
    pub fn default_pool(&self, device: u32) -> Result<usize, u32> {
        let slot = self.default_pools.get(device as usize).ok_or(code::INVALID_DEVICE)?;
        if let Some(&pool) = slot.get() {
            return Ok(pool);
        }
        let pool = self.sim.pool_create(device, 0).map_err(failed)?;
        match slot.set(pool) {
            Ok(()) => Ok(pool),
            Err(mine) => {
                self.sim.pool_destroy(device, mine).map_err(failed)?;
                slot.get().copied().ok_or(code::UNKNOWN)
            }
        }
    }

    /// Whether `pool` is a device's default pool.
    pub fn is_default_pool(&self, pool: usize) -> bool {
        self.default_pools.iter().any(|slot| slot.get() == Some(&pool))
    }

    /// The pool of `cudaMallocAsync` on `device`.
    pub fn current_pool(&self, device: u32) -> Result<usize, u32> {
        match self.current_pools.get(device as usize).ok_or(code::INVALID_DEVICE)?.load(Relaxed) {
            0 => self.default_pool(device),
            pool => Ok(pool),
        }
    }

    pub fn set_current_pool(&self, device: u32, pool: usize) -> Answer {
        self.sim.pool_books(pool).ok_or(code::INVALID_VALUE)?;
        self.current_pools.get(device as usize).ok_or(code::INVALID_DEVICE)?.store(pool, Relaxed);
        Ok(())
    }

    /// `cudaDeviceReset`: drops everything of this process on `device`.
    pub fn reset(&self, device: u32) -> Answer {
        let default = self.default_pools.get(device as usize).and_then(|pool| pool.get().copied());
        self.sim.reset_device(device, default).map_err(failed)?;
        self.current_pools[device as usize].store(0, Relaxed);
        Ok(())
    }

    /// `cudaFreeAsync`, of a pool's or a graph's memory.
    pub fn free_async(&self, device: u32, address: u64, stream: usize) -> Answer {
        match self.sim.allocation(address).map(|backing| backing.source) {
            _ if address == 0 => Err(code::INVALID_VALUE),
            Some(Source::Graph { .. }) => {
                self.sim.graph_free(device, address, stream).map_err(failed)
            }
            _ => self.sim.pool_free(device, address, stream).map_err(failed),
        }
    }

    /// Frees memory of `cuMemAlloc` or of a pool, as `cuMemFree` does.
    pub fn free(&self, address: u64) -> Answer {
        if address == 0 {
            return Ok(());
        }
        if self.host.kind(address as usize) == Some(Kind::Managed) {
            (0..self.device_count()).try_for_each(|device| self.device_synchronize(device))?;
            return self.host.free_managed(address as usize);
        }
        let device = self.device_of_address(address).unwrap_or(0);
        match self.sim.backing(address, 1).first().map(|piece| piece.source) {
            Some(Source::Pool(_)) => {
                self.device_synchronize(device)?;
                self.sim.pool_free(device, address, 0)
            }
            Some(Source::Graph { .. }) => {
                self.device_synchronize(device)?;
                self.sim.graph_free(device, address, 0)
            }
            _ => self.sim.free(device, address),
        }
        .map_err(failed)
    }

    /// The device with memory at `address`; `None`: not device memory.
    pub fn device_of_address(&self, address: u64) -> Option<u32> {
        if !(self.window.0..self.window.1).contains(&address) {
            return None;
        }
        self.sim.backing(address, 1).first().map(|piece| piece.device)
    }

    /// Start and length of the allocation or mapping that holds `address`.
    pub fn allocation_of(&self, address: u64) -> Option<(u64, u64)> {
        if !(self.window.0..self.window.1).contains(&address) {
            return None;
        }
        self.sim.allocation(address).map(|backing| (backing.address, backing.bytes))
    }

    /// Changes a device's memory (for `phantom_set_capacity`): others take the difference.
    pub fn set_capacity(&self, device: u32, bytes: u64) -> Answer {
        let capacity = self.sim.books(device).capacity;
        self.sim.set_taken(device, capacity.checked_sub(bytes).ok_or(code::INVALID_VALUE)?);
        Ok(())
    }
}

/// `CUmemPool_attribute` and `cudaMemPoolAttr`, which share their numbers.
pub fn pool_attribute(number: i32) -> Result<(PoolAttribute, bool), u32> {
    // True: the value is an int, else 64 bits.
    Ok(match number {
        CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES => {
            (PoolAttribute::ReuseFollowEventDependencies, true)
        }
        CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC => (PoolAttribute::ReuseAllowOpportunistic, true),
        CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES => {
            (PoolAttribute::ReuseAllowInternalDependencies, true)
        }
        CU_MEMPOOL_ATTR_RELEASE_THRESHOLD => (PoolAttribute::ReleaseThreshold, false),
        CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT => (PoolAttribute::ReservedCurrent, false),
        CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH => (PoolAttribute::ReservedHigh, false),
        CU_MEMPOOL_ATTR_USED_MEM_CURRENT => (PoolAttribute::UsedCurrent, false),
        CU_MEMPOOL_ATTR_USED_MEM_HIGH => (PoolAttribute::UsedHigh, false),
        _ => return Err(code::NOT_SUPPORTED),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_binary_units_only() {
        assert_eq!(parse_bytes("80GiB"), Some(80 << 30));
        assert_eq!(parse_bytes(" 1.5 MiB"), Some(3 << 19));
        assert_eq!(parse_bytes("4096"), Some(4096));
        for wrong in ["", "GiB", "80GB", "1e9", "-1", "1.2.3KiB"] {
            assert_eq!(parse_bytes(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_size_that_is_none_is_told_the_forms_of_one() {
        assert_eq!(sized("PHANTOM_MEMORY", "24GiB"), Ok(24 << 30));
        let said = sized("PHANTOM_MEMORY", "24G").unwrap_err();
        assert!(said.starts_with("PHANTOM_MEMORY=24G: not a size; write it as 24GiB"), "{said}");
    }

    #[test]
    fn device_memory_lies_in_the_window_and_may_be_written() {
        let (mut addresses, window) = HostAddresses::new(WINDOW, None).expect("address space");
        let first = addresses.reserve(4 << 20, 2 << 20).expect("room");
        assert!(window.0 < first && first + (4 << 20) <= window.1 && first.is_multiple_of(2 << 20));
        // SAFETY: the provider has just reserved these bytes for this test alone.
        unsafe { (first as *mut u64).write(7) };
        addresses.release(first, 4 << 20);
        // SAFETY: the window stays mapped for the life of the process.
        let word = unsafe { (first as *const u64).read() };
        assert_eq!(word, 0, "given back, it reads as fresh memory");
        assert_eq!(addresses.reserve(4 << 20, 2 << 20), Some(first), "address space is used again");
    }

    #[test]
    fn address_space_ends_with_the_window() {
        let (mut addresses, window) = HostAddresses::new(WINDOW, None).expect("address space");
        assert_eq!(addresses.reserve(window.1 - window.0, 2 << 20), None);
        assert!(addresses.reserve(1 << 30, 2 << 20).is_some(), "a refusal takes nothing");
    }
}
