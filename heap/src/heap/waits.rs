//! Whether streams may wait for each other before memory is exhausted.

use super::Heap;
use crate::settings::Waits;
use crate::sync::lock;

impl Heap {
    /// The loader knows that no wait of one stream for another can close a cycle in this process:
    /// it is alone, and nothing that it enqueues waits for what comes later
    /// ([`crate::order::waits`]). From now on `waits:auto` is `waits:budget`, unless it was
    /// forbidden before.
    pub fn allow_waits(&self) {
        if self.shared.permission.allow() && self.shared.settings.waits == Waits::Auto {
            log::info!(
                "waits:auto: a stream waits for another, on the device, where the process would \
                 else hold more than its live blocks have needed and the slack: the process is \
                 alone, on one device"
            );
        }
    }

    /// From now on `waits:auto` is `waits:oom`, for good; `why` is for the log. To be called before
    /// the work that may wait for what comes later is enqueued, with no lock of a device's held:
    /// when it returns, no request of another thread is on its way to add a wait.
    pub fn forbid_waits(&self, why: &str) {
        let is_news = self.shared.permission.forbid();
        // Who has seen the permission holds this lock until its waits are added.
        self.devices().for_each(|device| drop(lock(&device.central)));
        if is_news && self.shared.settings.waits == Waits::Auto {
            log::info!(
                "waits:auto: streams wait for each other only where the alternative is out of \
                 memory: {why}"
            );
        }
    }
}
