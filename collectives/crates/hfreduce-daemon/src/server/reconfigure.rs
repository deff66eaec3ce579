//! Reconfiguration of a session: the daemon agrees and connects on behalf of its rank.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric::arena::Arena;

use super::connection::ClientConnection;
use super::session::{Next, Session};
use crate::protocol::{ANSWER, Reconfigure, Reconfigured, Request, Response, await_message};
use hfreduce_core::error::ErrorKind;
use hfreduce_engine::communicator::Communicator;
use hfreduce_engine::endpoint::ReconfigureSource;

/// Maximum time for connecting.
pub(crate) const CONNECTS_WITHIN: Duration = Duration::from_secs(3600);

impl Session<'_> {
    /// Moves the session to the next epoch. After an error the rank may request it again.
    pub(crate) fn reconfigure(&mut self, request: &Reconfigure) -> Next {
        let Self { client, communicator, arena, .. } = self;
        if request.retired {
            arena.retire();
        }
        let timeout = Duration::from_millis(request.timeout_ms).min(CONNECTS_WITHIN);
        let Ok(origin) = ReconfigureSource::of(communicator) else { return Next::End };
        let (members, completed) = (&request.members, Some(request.completed));
        let watch = &mut || client.is_over();
        let following = communicator.reconfigure_as(origin, members, completed, timeout, watch);
        // The rank has ended its operations and waits for this answer only. An invalid list leaves
        // the epoch unchanged.
        if following.is_ok() || communicator.error().is_some() {
            self.calls.clear();
            self.end_reported = true;
        }
        let next = match following {
            Ok(next) => next,
            Err(error) => {
                self.client.line.send(&Response::Refused(Box::new(error)));
                // The end of its connection shows the rank that asking again is useless.
                return if self.client.is_stopped() { Next::End } else { Next::Wait };
            }
        };
        let started = send_reconfigured(&mut self.client, &next, &self.arena).and_then(|arena| {
            if !Arc::ptr_eq(&self.arena, &arena) {
                self.arena_used = 0;
            }
            self.arena = arena;
            next.watch_client(self.client.line.stream()).map_err(|error| error.to_string())
        });
        self.communicator = next;
        self.end_reported = false;
        self.last_message_at = Instant::now();
        if let Err(why) = started {
            self.fail(ErrorKind::PeerDied, why);
            return Next::End;
        }
        Next::Wait
    }
}

/// Reports the new epoch to a rank, and passes its memory if it is not `before`; returns the
/// memory.
pub(crate) fn send_reconfigured(
    client: &mut ClientConnection<'_>,
    communicator: &Communicator,
    before: &Arc<Arena>,
) -> Result<Arc<Arena>, String> {
    let origin = ReconfigureSource::of(communicator)?;
    let arena = communicator.arena()?;
    let other_memory = !Arc::ptr_eq(&arena, before);
    client.line.send(&Response::Reconfigured(Box::new(Reconfigured {
        infos: origin.infos(),
        rank: communicator.rank(),
        epoch: communicator.epoch(),
        channels: communicator.channels(),
        other_memory,
    })));
    if other_memory {
        match await_message(&mut client.line, Instant::now() + ANSWER)? {
            Request::Memory => client.delegate(&arena).map_err(|error| error.to_string())?,
            _ => return Err("unexpected message instead of Memory".to_owned()),
        }
    }
    Ok(arena)
}
