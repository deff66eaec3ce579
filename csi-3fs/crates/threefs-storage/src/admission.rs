//! Admission budgets of the storage port: memory for requests and replies, divided by request
//! class.
//!
//! The sizes affect performance only; the separation of classes keeps full budgets from deadlocking
//! the chains (`threefs_core::message::class`). An update holds its bytes at the head until every
//! replica has it, a forward at hop 1 until the replicas after it have it, and so on, so earlier
//! classes get more. Chains rarely have more than three replicas, so later hops get little.

use fabric::rpc::Budget;
use threefs_core::message::class;

/// Number of parts that the memory is divided into.
pub const PARTS: usize = 32;
/// Maximum number of calls in flight per class, of any size. A waiting call costs about 2 KiB.
const CALLS_MAX: usize = 16_384;
/// Maximum number of calls in flight per connection: far more than a client's window, far fewer
/// than `CALLS_MAX`.
pub(crate) const CALLS_OF_CONNECTION_MAX: usize = 512;

/// Returns one budget per class of requests.
#[must_use]
pub fn budgets(memory_bytes: usize) -> Vec<Budget> {
    (0..class::COUNT).map(|class| budget(class, memory_bytes / PARTS)).collect()
}

fn budget(class: u8, part: usize) -> Budget {
    let (requests, replies, shares) = match class {
        class::UPDATE => (7, 0, 4),
        // From the preceding nodes in the chains, over two connections each.
        1 => (5, 0, 2),
        2 => (4, 0, 2),
        3..=class::HOP_MAX => (1, 0, 2),
        class::REPLACE => (2, 0, 2),
        class::QUERY => (0, 3, 2),
        _ => (0, 8, 8),
    };
    Budget {
        calls_max: CALLS_MAX,
        bytes_max: requests * part,
        reply_bytes_max: replies * part,
        shares,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_classes_together_use_at_most_the_memory() {
        let budgets = budgets(PARTS << 20);
        assert_eq!(budgets.len(), usize::from(class::COUNT));
        let all: usize = budgets.iter().map(|it| it.bytes_max + it.reply_bytes_max).sum();
        assert_eq!(all, PARTS << 20);
        for class in class::UPDATE..=class::REPLACE {
            assert!(budgets[usize::from(class)].bytes_max > 0, "class {class} has payloads");
        }
    }
}
