//! Rendezvous: the exchange of small values between the ranks of a group that is not yet connected.

use fabric::deadline::Deadline;

/// The result of one exchange.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exchanged {
    /// Random name of this exchange, equal on all ranks; empty if the rendezvous serves only one
    /// group.
    pub name: String,
    /// The values of all ranks, in rank order.
    pub values: Vec<Vec<u8>>,
}

/// The part of one rank in the rendezvous of its group. All ranks run the same phases in the same
/// order; no call waits beyond its deadline, apart from the time to receive the reason of a
/// failure.
pub trait Rendezvous {
    /// Why an exchange failed.
    type Error;

    /// Host of the rendezvous, if known: the other ranks are on the same network.
    fn host(&self) -> Option<String>;

    /// Publishes `value` in `phase` and returns the values of all ranks.
    ///
    /// # Errors
    /// Ranks are absent, or the rendezvous failed.
    fn exchange(
        &self,
        phase: &str,
        value: &[u8],
        deadline: Deadline,
    ) -> Result<Exchanged, Self::Error>;

    /// Key of the group, for ranks that have no key file.
    ///
    /// # Errors
    /// As for [`Rendezvous::exchange`].
    fn key(&self, deadline: Deadline) -> Result<Vec<u8>, Self::Error>;
}
