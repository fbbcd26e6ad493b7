//! CUDA tensors across processes: torch's storage IPC (`torch.multiprocessing`, `reduce_tensor`).
//!
//! The sender gives torch a *name* of the block's memory, which torch sends to the receiver with
//! everything else that a tensor needs: an event of the sender's stream, and a count of the
//! receivers, for which the sender keeps the block. The receiver asks the sender's process for the
//! chunks behind the name, over a socket, and maps them.
//!
//! ```text
//!   sender                                         receiver
//!   torch: shareIpcHandle -> name_of  --name, by torch-->  torch: getIpcDevPtr -> open
//!   server: Heap::export_chunks     <--extent, by socket--   Heap::import_chunks
//!                                   --files of chunks-->
//! ```
//!
//! torch's own expandable segments send the numbers of open files, which the receiver copies out of
//! the sender with `pidfd_getfd`. That takes the right to trace the sender, which a sibling process
//! lacks on Ubuntu, and every process in a container without SYS_PTRACE (pytorch/pytorch#165685). A
//! socket takes no right but to be the same user, and no file stays open.
//!
//! Plain allocations (`backing:fixed`, `backing:passthrough`) go by the driver's own handle, in
//! torch's format: a receiver without Gruyère opens it too, and a sender's without Gruyère is
//! opened here.

mod name;
mod server;
mod socket;

use crate::heap::{ChunkFile, Export, Extent, Heap};
use name::{Name, Named};
use std::collections::VecDeque;

pub(super) use server::forget;

/// The name of the memory that the live block at `address` lies in, and where in it the block
/// starts.
///
/// # Errors
/// Why other processes cannot have it, for the user.
pub(super) fn name_of(heap: &Heap, address: u64) -> Result<(Vec<u8>, u64), String> {
    let refused = |why: String| {
        format!(
            "gruyere: this CUDA tensor cannot be shared with other processes: {why}. Send a copy \
             in host memory (tensor.cpu()), or use collectives (torch.distributed)"
        )
    };
    let export = heap.export(address).map_err(|error| refused(error.to_string()))?;
    let name = match export {
        Export::Plain(_, handle) => handle.to_vec(),
        Export::Chunks(extent) => {
            Name { server: server::started().map_err(refused)?, extent }.to_bytes()
        }
    };
    Ok((name, address - export.address()))
}

/// Opens the memory that another process has named, for `device`; its address here.
///
/// # Errors
/// Why it cannot be opened, for the user.
pub(super) fn open(heap: &Heap, device: u32, name: &[u8]) -> Result<u64, String> {
    let opened = match Named::parse(name)? {
        Named::Plain(handle) => heap.import_plain(device, handle),
        Named::Chunks(Name { server, extent }) => {
            let mut received =
                Received { server, extent, connection: None, chunks: VecDeque::new() };
            heap.import_chunks(device, name, extent.bytes, &mut || received.next())
        }
    };
    opened.map_err(|error| {
        format!("gruyere: a CUDA tensor of another process cannot be opened: {error}")
    })
}

/// The chunks of an extent as they come from the sender, a batch at a time.
struct Received {
    server: server::Token,
    extent: Extent,
    connection: Option<socket::Connection>,
    chunks: VecDeque<ChunkFile>,
}

impl Received {
    fn next(&mut self) -> Result<ChunkFile, String> {
        if let Some(chunk) = self.chunks.pop_front() {
            return Ok(chunk);
        }
        let connection = match &self.connection {
            Some(connection) => {
                server::ask_for_more(connection)?;
                connection
            }
            None => self.connection.insert(server::ask(&self.server, self.extent)?),
        };
        self.chunks = server::receive(connection)?;
        self.chunks.pop_front().ok_or_else(|| "the sender's answer has no memory".to_owned())
    }
}
