"""A watch over an adapter that learns without labels: it sees the adapter collapse and takes it back to where it was well.

`signals` has the running sums of what adapter and source predict, `judge` turns them into a verdict, `actions` changes the
adapter, and `guard` is the wrapper that brings them together. Signals are judged together: a narrow distribution of labels
is no sign of a collapse if the source sees it too, and disagreement with the source is none if the source itself is lost.

    concentration   1 - H(mean prediction) / log(classes) over the last `window` samples; 1 is a single class
    entropy         mean entropy of the predictions, in nats
    confidence      mean probability of the predicted label
    disagreement    share of samples for which the source predicts another label
    distance        root mean square of (θ - θ_0) / σ by the source posterior if the method has one, else |θ - θ_0| / |θ_0|
    update          the same measure of the distance travelled since the last snapshot, per batch
    drift           how much flatter its predictions without views are than the source's: (H - H_0) / log(classes)
    strangers       how far few images pull the statistics of the last batch looked at away from those of most, in standard
                    deviations between images, in the layer where it is least

A collapse raises an alarm. Wear does not look like one: averages of averages make predictions a little flatter with every
batch, and over thousands of batches errors follow. So drift is held: above its limit, the weights are pulled a little toward
the source at every look until it is back. Strangers in a batch raise an alarm of their own kind, whatever the policy: the
answers to this batch are in doubt, and nothing is changed, for it is not the weights that are wrong.
"""

from petal.guard.actions import Alarm
from petal.guard.guard import Guard

__all__ = ["Alarm", "Guard"]
