//! The heap of a process. Its calls find the device, note what torch, a history or a trace want
//! noted, and leave the placement of blocks to the device.

use crate::device::Device;
use crate::driver::timed::{OnRecord, Timed};
use crate::driver::{DeviceId, Driver, DriverError};
pub(crate) use crate::error::Error;
use crate::order::waits::Permission;
use crate::report::books::History;
use crate::runs::page_table::PageTable;
use crate::settings::Settings;
use crate::shared::{MAX_DEVICES, Shared};
use crate::sharing::foreign::Imports;
use crate::sites::Sites;
use crate::supply::{self, Way};
use crate::sync::{Mutex, lock};
use gruyere_record::SiteId;
use gruyere_record::facts::Process;
use gruyere_record::record_dir::record_dir;
use gruyere_record::trace::Tracer;
use gruyere_record::{DeviceFacts, DeviceGauge, Record, RecordOptions, trace};
use once_cell::race::OnceBox;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A bit of [`Heap::special`]: requests must ask whether their stream captures.
pub(crate) const WATCH_CAPTURES: u32 = 1;
/// Some device may use `backing:passthrough`.
pub(crate) const PASSTHROUGH: u32 = 2;
/// A debugging switch is on.
pub(crate) const DEBUG: u32 = 4;
/// The heap keeps a history of blocks.
pub(crate) const HISTORY: u32 = 8;
pub(crate) const TRACE: u32 = 16;
/// The heap serves callers of CUDA's functions; torch's hooks, if they come too, have not been
/// announced.
pub(crate) const UNANNOUNCED: u32 = 32;
/// Blocks from 1 MiB on get dedicated allocations.
const DEDICATED: u32 = 64;
/// The heap reports each malloc and free to an observer outside.
pub(crate) const TOLD: u32 = 128;
/// Small blocks get a site too.
pub(crate) const ALL_SITES: u32 = 256;

/// The byte with which `debug:poison` fills fresh blocks.
pub const POISON_FRESH: u8 = 0xCD;
/// The byte with which `debug:poison` fills freed blocks.
pub const POISON_FREED: u8 = 0xDD;

/// The allocator of a process.
pub struct Heap {
    pub(crate) shared: Shared,
    /// By number, which has six bits in the page table. Those from `count` on stay empty.
    pub(crate) devices: [OnceBox<Device>; MAX_DEVICES as usize],
    count: u32,
    pub(crate) making: Mutex<()>,
    /// What takes requests off the straight path: a set of the bits above. WATCH_CAPTURES is set
    /// while the hooks are not announced or a pool scope is open anywhere, HISTORY while the heap
    /// keeps a history, TOLD while an observer gets reports of blocks, UNANNOUNCED from the first
    /// call of a CUDA program until torch's hooks are announced or met; the others never change.
    pub(crate) special: AtomicU32,
    /// Pool scopes open on all devices; guards the changes of WATCH_CAPTURES.
    pub(crate) pool_scopes: Mutex<u32>,
    pub(crate) bad_frees: AtomicU64,
    /// What is mapped of other processes' memory.
    pub(crate) imports: Mutex<Imports>,
    /// Held while memory of another process is opened.
    pub(crate) opening: Mutex<()>,
    pub(crate) history: History,
    /// The trace that `trace:` asks for.
    pub(crate) trace: Option<Tracer>,
}

impl Heap {
    /// Creates the heap over `driver`, and its record. Takes no memory from the driver yet.
    ///
    /// # Errors
    /// The driver's error, if it cannot count the devices.
    pub fn new(driver: Arc<dyn Driver>, settings: Settings) -> Result<Self, DriverError> {
        let count = driver.device_count()?.min(MAX_DEVICES);
        let facts: Vec<DeviceFacts> = (0..count)
            .map(|id| {
                driver.capabilities(id).map_or_else(
                    |_| DeviceFacts::default(),
                    |device| DeviceFacts {
                        name: device.name,
                        uuid: device.uuid,
                        total_memory: device.total_memory,
                    },
                )
            })
            .collect();
        let options = RecordOptions {
            enabled: settings.record,
            directory: record_dir(),
            ring_events: settings.ring_events,
            max_blocks: settings.record_blocks,
            kept: settings.records_kept as usize,
        };
        // Never freed: threads that outlive main may still write to it.
        let record: &'static Record = Box::leak(Box::new(Record::create(&options, &facts)));
        let debug = settings.debug.poison || settings.debug.sync;
        let passthrough = supply::configured_way(settings.backing, false) == Some(Way::Driver);
        let special = WATCH_CAPTURES
            | if passthrough { PASSTHROUGH } else { 0 }
            | if debug { DEBUG } else { 0 };
        let trace = settings.trace.as_ref().and_then(|name| {
            let process = Process::current();
            Tracer::start(&trace::expand(name, process.pid, process.rank))
        });
        let special = special | if trace.is_some() { TRACE } else { 0 };
        Ok(Self {
            shared: Shared {
                driver: if settings.record {
                    Arc::new(Timed::new(driver.clone(), OnRecord::new(record)))
                } else {
                    driver.clone()
                },
                questions: driver,
                settings,
                table: PageTable::default(),
                record,
                dedicated: false,
                sites: None,
                step: AtomicU32::new(0),
                hooks: Arc::new(AtomicU32::new(0)),
                permission: Permission::default(),
            },
            devices: [const { OnceBox::new() }; MAX_DEVICES as usize],
            count,
            making: Mutex::new(()),
            special: AtomicU32::new(special),
            pool_scopes: Mutex::new(0),
            bad_frees: AtomicU64::new(0),
            imports: Mutex::new(Imports::default()),
            opening: Mutex::new(()),
            history: History::default(),
            trace,
        })
    }

    /// With `backing:fixed`, blocks from 1 MiB on get dedicated allocations from now on: CUDA's
    /// handles for other processes name whole allocations of the driver, and open at their starts.
    /// Call it before the first block is handed out.
    ///
    /// A span is the block's size rounded up to 2 MiB. Once free, it serves blocks of that very
    /// size or goes back to the driver.
    pub fn dedicate_allocations(&mut self) {
        if supply::configured_way(self.shared.settings.backing, true) == Some(Way::Dedicated) {
            self.shared.dedicated = true;
            self.special.fetch_or(DEDICATED, Ordering::AcqRel);
        }
    }

    /// The site of the calling thread, if the heap has a source of sites. Call it with no lock of
    /// the heap held.
    pub fn site_here(&self) -> SiteId {
        self.shared.site(0)
    }

    /// Asks `sites` from now on for the site of requests above 16 KiB and of those that make slabs;
    /// with `all`, of every request, which takes them off the hot path. Call it before the first
    /// block is handed out.
    pub fn ask_sites(&mut self, sites: Box<dyn Sites>, all: bool) {
        self.shared.sites = Some(sites);
        if all {
            self.special.fetch_or(ALL_SITES, Ordering::AcqRel);
        }
    }

    /// The record of the process.
    pub fn record(&self) -> &'static Record {
        self.shared.record
    }

    /// The settings in force.
    pub fn settings(&self) -> &Settings {
        &self.shared.settings
    }

    /// The training step.
    pub fn step(&self) -> u32 {
        self.shared.step()
    }

    /// The driver's name of a device; empty if the heap has not used the device.
    pub fn device_name(&self, id: DeviceId) -> String {
        let device = self.device_in_use(id.into()).ok().flatten();
        device.map_or_else(String::new, |device| device.capabilities.name.clone())
    }

    /// Devices that the driver has, at most [`MAX_DEVICES`].
    pub fn device_count(&self) -> u32 {
        self.count
    }

    /// The heap of a device; its first use creates it.
    #[inline]
    pub(crate) fn device(&self, id: i64) -> Result<&Device, Error> {
        match self.device_in_use(id)? {
            Some(device) => Ok(device),
            None => self.make_device(id as u32),
        }
    }

    /// The heap of a device, if the process has used it.
    #[inline]
    pub(crate) fn device_in_use(&self, id: i64) -> Result<Option<&Device>, Error> {
        if !(0..i64::from(self.count)).contains(&id) {
            return Err(Error::NoSuchDevice(id));
        }
        Ok(self.devices[id as usize].get())
    }

    #[cold]
    fn make_device(&self, id: DeviceId) -> Result<&Device, Error> {
        let _making = lock(&self.making);
        let cell = &self.devices[id as usize];
        if cell.get().is_none() {
            let device = Device::new(&self.shared, id)?;
            {
                let mut central = lock(&device.central);
                let (limit, total) = (central.limit, device.capabilities.total_memory);
                central
                    .gauges
                    .set(&[(DeviceGauge::Limit, limit), (DeviceGauge::TotalMemory, total)]);
            }
            self.tell_of_history(&device);
            device.map_reserves(&self.shared)?;
            if self.devices().next().is_some() {
                self.forbid_waits("the process uses a second device");
            }
            // Peers get access to each other's memory when the process begins to use both.
            for (other, cell) in self.devices.iter().enumerate() {
                let Some(peer) = cell.get() else { continue };
                let driver = &*self.shared.driver;
                if driver.can_access_peer(other as u32, id).unwrap_or(false) {
                    lock(&device.central).backing.allow_peer(driver, other as u32);
                }
                if driver.can_access_peer(id, other as u32).unwrap_or(false) {
                    lock(&peer.central).backing.allow_peer(driver, id);
                    self.allow_peer_of_imports(peer.id, id);
                }
            }
            let _ = cell.set(Box::new(device));
        }
        cell.get().ok_or(Error::Internal("a device vanished"))
    }

    pub(crate) fn devices(&self) -> impl Iterator<Item = &Device> {
        self.devices.iter().filter_map(OnceBox::get)
    }
}
