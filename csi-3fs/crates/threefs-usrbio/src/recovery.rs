//! Registration again after the daemon of the mount was replaced. The new daemon answers a request
//! of a session that it does not know with ESTALE; then a new session is opened, and whatever is
//! used next is registered in it.

use std::sync::Arc;

use rustix::io::Errno;

use crate::session::{Live, Session};

/// Maximum number of daemons in a row that end during one call.
const DAEMONS_MAX: usize = 8;

/// Calls `request` with the current session; again with a new one if the daemon was replaced.
pub(crate) fn with_live<T>(
    session: &Session,
    mut request: impl FnMut(&Arc<Live>) -> Result<T, Errno>,
) -> Result<T, Errno> {
    session.check_fork()?;
    let mut live = session.live();
    for _ in 0..DAEMONS_MAX {
        match request(&live) {
            Err(Errno::STALE) => live = session.renew(&live)?,
            result => return result,
        }
    }
    Err(Errno::STALE)
}
