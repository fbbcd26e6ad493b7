//! Blocks used by other streams: an event for each use at the free, polled at every malloc.

use super::blocks::BlockId;
use gruyere::driver::{DeviceId, Driver, EventHandle, Result, StreamHandle};
use std::collections::{BTreeMap, VecDeque};

/// Outstanding events of a device, one queue per stream, and events for reuse.
#[derive(Default)]
pub(super) struct Events {
    queues: BTreeMap<StreamHandle, VecDeque<(EventHandle, BlockId)>>,
    idle: Vec<EventHandle>,
}

impl Events {
    /// Records the end of `stream`'s use of `block`.
    pub fn record(
        &mut self,
        driver: &dyn Driver,
        device: DeviceId,
        stream: StreamHandle,
        block: BlockId,
    ) -> Result<()> {
        let event = match self.idle.pop() {
            Some(event) => event,
            None => driver.event_create(device)?,
        };
        driver.event_record(device, event, stream)?;
        self.queues.entry(stream).or_default().push_back((event, block));
        Ok(())
    }

    /// Blocks of completed events; each stream's queue is polled until its first unfinished event.
    pub fn poll(
        &mut self,
        driver: &dyn Driver,
        device: DeviceId,
        done: &mut Vec<BlockId>,
    ) -> Result<()> {
        for queue in self.queues.values_mut() {
            while let Some(&(event, block)) = queue.front() {
                if !driver.event_query(device, event)? {
                    break;
                }
                queue.pop_front();
                self.idle.push(event);
                done.push(block);
            }
        }
        // As torch does: streams without events are no longer polled.
        self.queues.retain(|_, queue| !queue.is_empty());
        Ok(())
    }

    /// Waits on the host for every outstanding event.
    pub fn synchronize(
        &mut self,
        driver: &dyn Driver,
        device: DeviceId,
        done: &mut Vec<BlockId>,
    ) -> Result<()> {
        for queue in self.queues.values_mut() {
            while let Some(&(event, block)) = queue.front() {
                driver.event_synchronize(device, event)?;
                queue.pop_front();
                self.idle.push(event);
                done.push(block);
            }
        }
        self.queues.clear();
        Ok(())
    }
}
