//! `gruyere address`: the current and earlier contents of a device's address.

use std::fmt::Write as _;
use std::slice;

use gruyere::heap::Bytes;
use gruyere_record::dump::state::lifetime_name;
use gruyere_record::picture::PAGE;
use gruyere_record::reader::Cursor;
use gruyere_record::ring::Event;
use gruyere_record::sites::{Place, SiteId, Sites, fill_from_slabs};
use gruyere_record::stream::StreamNumber;
use gruyere_record::{BlockEntry, BlockState, EventKind, Reader, SegmentEntry, SegmentKind};
use serde_json::{Value, json};

use crate::driver_calls::span;
use crate::failure::{Ended, Exit};
use crate::target::Target;
use crate::{output, sites, wrap};

/// Shows what lies at a device address, and which blocks lay there before.
#[derive(clap::Args)]
#[command(
    allow_missing_positional = true,
    after_help = "\
Examples:
  gruyere address 4242 0x7f3a40200400
                               an address from compute-sanitizer or cuda-gdb
  gruyere address 4242 0x7f3a40200400 --json | jq '.before[0]'

Use it after an illegal access. Under torch's allocator, a tensor that is used after its free (a \
missing record_stream) reads stale data; under Gruyère, its pages may have moved by then, and the \
access faults. Earlier blocks are known as far back as the record's events reach (`ring_events:` \
in GRUYERE_CONF keeps more). docs/after-the-crash.md has the whole procedure.

Exit codes: 0 success; 1 no such process or record, or it can't be read; 2 wrong usage; 3 read, \
but some values are marked torn: they are not from one moment, since the process was killed while \
it wrote."
)]
pub struct Arguments {
    #[command(flatten)]
    target: Target,
    /// The address: hexadecimal with 0x, or decimal.
    #[arg(value_parser = parse, required = true)]
    address: u64,
    /// Print JSON. Sizes are in bytes, times in nanoseconds.
    #[arg(long)]
    json: bool,
}

fn parse(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.replace('_', "");
    let parsed = match digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")) {
        Some(hexadecimal) => u64::from_str_radix(hexadecimal, 16),
        None => digits.parse(),
    };
    parsed.map_err(|_| "not an address: write it as 0x7f3a40200400, or in decimal".to_owned())
}

/// Backing of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Backed {
    /// In a span of the driver's, or in a mapping's pages that hold blocks.
    Held(SegmentEntry),
    /// Mapped, but no request is served from it: its former contents lie elsewhere by now, or
    /// nowhere.
    StaleAlias(SegmentEntry),
    /// In our address space, with nothing mapped.
    Unmapped(SegmentEntry),
    /// Not ours.
    Unknown,
}

/// Whether `address` lies in the `bytes` from `start` on; a damaged record may exceed the end of
/// all addresses.
fn covers(start: u64, bytes: u64, address: u64) -> bool {
    address.checked_sub(start).is_some_and(|offset| offset < bytes)
}

fn backed(segments: &[SegmentEntry], address: u64) -> Backed {
    let here = |segment: &&SegmentEntry| covers(segment.address, segment.bytes, address);
    let of = |kind| segments.iter().filter(here).find(move |segment| segment.kind == kind).copied();
    if let Some(view) = of(SegmentKind::View) {
        let page = (address - view.address) / PAGE;
        return if page < 128 && view.pages >> page & 1 == 1 {
            Backed::Held(view)
        } else {
            Backed::StaleAlias(view)
        };
    }
    match (of(SegmentKind::Span), of(SegmentKind::Reservation)) {
        (Some(span), _) => Backed::Held(span),
        (None, Some(reservation)) => Backed::Unmapped(reservation),
        (None, None) => Backed::Unknown,
    }
}

impl Backed {
    fn name(&self) -> &'static str {
        match self {
            Self::Held(_) => "held",
            Self::StaleAlias(_) => "shadow",
            Self::Unmapped(_) => "unmapped",
            Self::Unknown => "unknown",
        }
    }

    fn sentence(&self) -> String {
        match self {
            Self::Held(segment) => {
                format!(
                    "in {} at {:#x}, held on device {}",
                    Bytes(segment.bytes),
                    segment.address,
                    segment.device
                )
            }
            Self::StaleAlias(segment) => format!(
                "in a mapping of {} at {:#x} on device {} whose pages here are now used at other \
                 addresses: an access reads their present contents, and faults once this mapping \
                 is gone",
                Bytes(segment.bytes),
                segment.address,
                segment.device
            ),
            Self::Unmapped(segment) => {
                format!("nothing is mapped there (device {}): an access faults", segment.device)
            }
            Self::Unknown => {
                "not Gruyère's memory: another library's, or unmapped (an access faults)".to_owned()
            }
        }
    }
}

/// A block that lay at the address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tenant {
    address: u64,
    bytes: u64,
    stream: u32,
    lifetime: u8,
    device: u8,
    /// Ticks; `None`: before the record's memory.
    handed_out: Option<u64>,
    /// Ticks; `None`: its free was not seen.
    freed: Option<u64>,
}

/// The blocks that covered `address`, the latest first.
fn tenants(events: &[Event], address: u64) -> Vec<Tenant> {
    let mut tenants: Vec<Tenant> = Vec::new();
    let here = |event: &&Event| {
        matches!(event.kind, EventKind::Malloc | EventKind::Free)
            && covers(event.address, event.size, address)
    };
    for event in events.iter().filter(here) {
        let tenant = Tenant {
            address: event.address,
            bytes: event.size,
            stream: event.stream,
            lifetime: event.lifetime,
            device: event.device,
            handed_out: None,
            freed: None,
        };
        if event.kind == EventKind::Malloc {
            tenants.push(Tenant { handed_out: Some(event.time), ..tenant });
            continue;
        }
        match tenants.last_mut() {
            Some(last) if last.address == event.address && last.freed.is_none() => {
                last.freed = Some(event.time)
            }
            // Allocated before the record's memory.
            _ => tenants.push(Tenant { freed: Some(event.time), ..tenant }),
        }
    }
    tenants.reverse();
    tenants
}

pub fn run(arguments: &Arguments) -> Ended {
    let reader = arguments.target.open()?;
    let (blocks, segments) = (reader.blocks(), reader.segments());
    let events = reader.events(&mut Cursor::default());
    reader.expect_sound()?;
    let address = arguments.address;
    let mut block = blocks
        .entries
        .iter()
        .copied()
        .find(|(block, _)| covers(block.address, block.size, address));
    if let Some((block, _)) = &mut block {
        fill_from_slabs(slice::from_mut(block), &segments.entries);
    }
    let found = Found {
        address,
        backed: backed(&segments.entries, address),
        block,
        sites: reader.sites(),
        tenants: tenants(&events.entries, address),
        events: events.entries.len(),
        latest: events.entries.iter().map(|event| event.time).max(),
    };
    let text = match arguments.json {
        true => format!("{:#}\n", found.value(&reader)),
        false => wrap::fit(&found.text(&reader)),
    };
    output::print(text)?;
    Ok(if blocks.torn + segments.torn > 0 { Exit::Torn } else { Exit::Fine })
}

/// The record's facts about an address.
struct Found {
    address: u64,
    backed: Backed,
    block: Option<(BlockEntry, BlockState)>,
    sites: Sites,
    tenants: Vec<Tenant>,
    /// Events read, and the time of the latest (ticks).
    events: usize,
    latest: Option<u64>,
}

/// The most earlier blocks in the text.
const SHOWN: usize = 8;

impl Found {
    fn before(&self) -> impl Iterator<Item = &Tenant> {
        // The live block has a line of its own.
        let live = self.block.map(|(block, _)| block.address);
        self.tenants
            .iter()
            .skip_while(move |tenant| tenant.freed.is_none() && Some(tenant.address) == live)
    }

    fn value(&self, reader: &Reader<'_>) -> Value {
        let scale = reader.scale();
        let time = |ticks: Option<u64>| ticks.and_then(|ticks| Some(scale?.realtime(ticks)));
        let block = self.block.map(|(block, state)| {
            json!({
                "address": block.address, "bytes": block.size, "requested_bytes": block.requested,
                "device": block.device,
                "stream": block.stream, "lifetime": lifetime_name(block.lifetime),
                "step": block.step,
                "waits_for_streams": state == BlockState::Pending,
                "site": sites::value(&self.sites, block.site),
            })
        });
        let before: Vec<Value> = self
            .before()
            .map(|tenant| {
                json!({
                    "address": tenant.address, "bytes": tenant.bytes, "device": tenant.device,
                    "stream": tenant.stream,
                    "lifetime": lifetime_name(tenant.lifetime),
                    "handed_out_nanoseconds": time(tenant.handed_out),
                    "freed_nanoseconds": time(tenant.freed),
                })
            })
            .collect();
        json!({
            "address": self.address, "backed": self.backed.name(), "block": block, "before": before,
            "events": self.events, "latest_event_nanoseconds": time(self.latest),
        })
    }

    /// The block's place in the program, with the whole stack.
    fn tell_site(&self, text: &mut String, id: SiteId) {
        if self.sites.get(id).is_none() {
            return;
        }
        let (line, module) = (self.sites.place(id), self.sites.module(id));
        let module = match module {
            Place::Module(path) if module != line => format!(", module {path}"),
            _ => String::new(),
        };
        // Writing to a String cannot fail.
        let _ = writeln!(text, "from    {line}{module}");
        for frame in self.sites.stack(id) {
            let _ = writeln!(text, "          {frame}");
        }
    }

    fn text(&self, reader: &Reader<'_>) -> String {
        let scale = reader.scale();
        // Time before the record's latest event.
        let ago = |ticks: u64| {
            let (Some(scale), Some(latest)) = (scale, self.latest) else {
                return "at an unknown time".to_owned();
            };
            let nanoseconds = scale.realtime(latest).saturating_sub(scale.realtime(ticks));
            format!("{} before the last event", span(nanoseconds))
        };
        let mut text = format!("{:#x}: {}\n", self.address, self.backed.sentence());
        // Writing to a String cannot fail, here and below.
        let _ = match self.block {
            Some((block, state)) => writeln!(
                text,
                "now     a {} of {} at {:#x} (byte {} of it), {} requested, stream {}, {}{}",
                if state == BlockState::Pending {
                    "pending block (freed, waits for streams)"
                } else {
                    "live block"
                },
                Bytes(block.size),
                block.address,
                self.address - block.address,
                Bytes(block.requested),
                StreamNumber(block.stream),
                self.sites.lifetime_or_phase(block.lifetime, block.site),
                if block.step > 0 { format!(", of step {}", block.step) } else { String::new() }
            ),
            None => writeln!(text, "now     no block"),
        };
        if let Some((block, _)) = self.block {
            self.tell_site(&mut text, block.site);
        }
        let before: Vec<&Tenant> = self.before().collect();
        for tenant in before.iter().take(SHOWN) {
            let handed_out =
                tenant.handed_out.map_or("before the oldest event in the record".to_owned(), ago);
            let _ = writeln!(
                text,
                "before  a block of {} at {:#x} (byte {} of it), stream {}, {}: allocated \
                 {handed_out}, {}",
                Bytes(tenant.bytes),
                tenant.address,
                self.address - tenant.address,
                StreamNumber(tenant.stream),
                lifetime_name(tenant.lifetime),
                tenant.freed.map_or("its free is not in the record".to_owned(), |ticks| format!(
                    "freed {}",
                    ago(ticks)
                ))
            );
        }
        if before.len() > SHOWN {
            let _ =
                writeln!(text, "        and {} earlier (--json lists all)", before.len() - SHOWN);
        }
        let _ = match before.first() {
            Some(tenant) => writeln!(
                text,
                "If the access was meant for the block of {}, the program had already freed that \
                 memory: look for a tensor of stream {} that another stream used without \
                 record_stream, or that was dropped while work on it was queued.",
                Bytes(tenant.bytes),
                StreamNumber(tenant.stream)
            ),
            None => writeln!(
                text,
                "The latest {} events show no other block there; ring_events: in GRUYERE_CONF \
                 keeps more events.",
                self.events
            ),
        };
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: EventKind, address: u64, size: u64, time: u64) -> Event {
        Event {
            position: time,
            kind,
            device: 0,
            lifetime: 0,
            stream: 1,
            address,
            size,
            time,
            turn: time,
        }
    }

    #[test]
    fn each_block_that_covered_the_address_is_told_once_the_latest_first() {
        use EventKind::{Free, Grow, Malloc};
        let events = [
            event(Free, 0x1000, 0x200, 1),
            event(Grow, 0, 0x10_0000, 2),
            event(Malloc, 0x1000, 0x1000, 3),
            event(Malloc, 0x2000, 0x1000, 4),
            event(Free, 0x1000, 0x1000, 5),
            event(Malloc, 0x1100, 0x100, 6),
        ];
        let told: Vec<_> =
            tenants(&events, 0x1180).iter().map(|t| (t.bytes, t.handed_out, t.freed)).collect();
        assert_eq!(
            told,
            [(0x100, Some(6), None), (0x1000, Some(3), Some(5)), (0x200, None, Some(1))]
        );
        assert_eq!(tenants(&events, 0x3000), []);
    }

    #[test]
    fn a_page_of_a_mapping_is_held_or_a_stale_alias() {
        let view = SegmentEntry {
            kind: SegmentKind::View,
            address: 8 * PAGE,
            bytes: 3 * PAGE,
            pages: 0b101,
            ..SegmentEntry::default()
        };
        let space = SegmentEntry {
            kind: SegmentKind::Reservation,
            address: 0,
            bytes: 100 * PAGE,
            ..SegmentEntry::default()
        };
        let names = [8, 9, 10, 11, 100].map(|page| backed(&[space, view], page * PAGE + 5).name());
        assert_eq!(names, ["held", "shadow", "held", "unmapped", "unknown"]);
    }

    #[test]
    fn addresses_are_read_as_tools_print_them() {
        assert_eq!(parse("0x7f3a_4020_0400"), Ok(0x7f3a_4020_0400));
        assert_eq!(parse(" 4096 "), Ok(4096));
        assert!(parse("7f3a").is_err() && parse("").is_err() && parse("0x").is_err());
    }
}
