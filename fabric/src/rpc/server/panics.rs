//! Futures whose panics are results, as of a separate task, but without one.

use std::any::Any;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::Poll;

/// The future has panicked, with this message.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Panicked(pub String);

impl Panicked {
    fn new(payload: &(dyn Any + Send)) -> Self {
        let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
        Self(text.unwrap_or_else(|| "a value that is not text".to_owned()))
    }
}

/// The output of a future, unless it panics. State that it shares with others must bear that, as it
/// must when a task panics.
pub(super) async fn until_panic<T>(
    mut future: Pin<&mut impl Future<Output = T>>,
) -> Result<T, Panicked> {
    poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
        Ok(polled) => polled.map(Ok),
        Err(payload) => Poll::Ready(Err(Panicked::new(&*payload))),
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;

    #[tokio::test]
    async fn a_panic_is_a_result() {
        assert_eq!(until_panic(pin!(async { 3 })).await, Ok(3));
        let at_once = pin!(async { panic!("as asked") });
        assert_eq!(until_panic(at_once).await, Err::<(), _>(Panicked("as asked".into())));
        let later = pin!(async {
            tokio::task::yield_now().await;
            panic!("after {} pause", 1)
        });
        assert_eq!(until_panic(later).await, Err::<(), _>(Panicked("after 1 pause".into())));
    }
}
