//! Whether a stream still has work while the host does something else.

use super::Streams;
use super::events::Reach;
use super::stream::is_quiet;
use crate::driver::{Driver, EventHandle};
use crate::sync::lock;

impl Streams {
    /// An event behind the work of `stream` so far. `None`: none can be recorded there.
    ///
    /// Never call it while anything captures on the device.
    pub(crate) fn mark(&self, driver: &dyn Driver, stream: u32) -> Option<EventHandle> {
        // Under this lock the number passes to no other stream.
        let mut fences = lock(&self.fences);
        let Reach::Here(handle) = self.reach(stream, None) else { return None };
        if !is_quiet(driver.capture_status(self.device, handle)) {
            return None;
        }
        let event = fences.take_event(driver, self.device)?;
        if driver.event_record(self.device, event, handle).is_ok() {
            return Some(event);
        }
        fences.spare.push(event);
        None
    }

    /// Whether the work before `mark` is done, as far as the driver says. The mark is over.
    pub(crate) fn is_past(&self, driver: &dyn Driver, mark: EventHandle) -> bool {
        let done = driver.event_query(self.device, mark);
        lock(&self.fences).spare.push(mark);
        done != Ok(false)
    }
}
